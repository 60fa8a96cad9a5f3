"""`publish`: a trained model as a repository of the Hugging Face Hub.

The Hub's own client, huggingface_hub, uploads: it is installed with tokenizers, resumes large files, and knows the
user's login.
"""

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kernels import Option, UserError
from zoo.arguments import errors_about
from zoo.checkpoints.tensor_files import has_tensor_files
from zoo.evaluation.record import FILE as ROWS
from zoo.files.links import read_regular
from zoo.files.output import CARD, OF_A_MODEL, WEIGHTS
from zoo.report.checks import parse_record
from zoo.saved.convert import convert
from zoo.saved.export import export
from zoo.saved.exported_folder import CONFIG, HASHES
from zoo.saved.hub import HubModel, hub_errors, on_hub
from zoo.saved.model import SavedModel
from zoo.saved.public.folder import CONFIG as PUBLIC_CONFIG
from zoo.saved.public.folder import PublicFolder
from zoo.saved.public.model_card import model_card
from zoo.saved.public.standalone.written import MODEL_TYPE
from zoo.saved.public.tokenizer import TEMPLATE

log = logging.getLogger(__name__)

EVALUATION = "evaluation.jsonl"
_NAMES = (CARD, CONFIG, HASHES, PUBLIC_CONFIG, TEMPLATE, *OF_A_MODEL, "LICENSE", "LICENSE.md", "LICENSE.txt")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SECRET = re.compile(rb"\bhf_[A-Za-z0-9]{30,}|\bAKIA[A-Z0-9]{16}\b|\bsk-[\w-]{32,}|-----BEGIN [A-Z ]*PRIVATE KEY-----")
_MOST_BYTES = 1 << 26  # of a file other than weights
_TO_FILL_IN = "to be filled in*"
_MOST_ROWS = 40  # of an evaluation in the card


@dataclass(frozen=True)
class Publication:
    """The contents of a repository, and its address.

    Attributes:
        repo: Its name, `owner/name`.
        files: Name → size in bytes.
        card: The model card.
        url: Where the commit is; None after a dry run.
    """

    repo: str
    files: Mapping[str, int]
    card: str
    url: str | None = None

    def report(self) -> str:
        """The files with their sizes, the card, and what is missing in it; after an upload, the address."""
        if self.url is not None:
            return f'{self.url}\nnext: zoo.load("hf://{self.repo}")'
        lines = [f"{size:>16,} bytes  {name}" for name, size in self.files.items()]
        lines += [f"{sum(self.files.values()):>16,} bytes  in {len(self.files)} files for {self.repo}", "", self.card]
        if places := self.card.count(_TO_FILL_IN):
            lines.append(f"{CARD} has {places} place{'s' if places > 1 else ''} {_TO_FILL_IN.rstrip('*')}.")
        return "\n".join([*lines, "Nothing was uploaded, and the Hub was not asked."])


def publish(
    checkpoint: str | Path,
    repo: str,
    to: str | None = None,
    evaluation: str | Path | None = None,
    private: bool = False,
    dry_run: bool = False,
    trust: bool = False,
    overwrite: bool = False,
) -> Publication:
    """Upload a trained model to the Hugging Face Hub: weights, config, tokenizer, model card and evaluation.

    The upload is one commit, so the repository has all of its files or none. Log in first by `hf auth login`, or set
    HF_TOKEN; HF_ENDPOINT names another hub.

    Args:
        checkpoint: A run's folder or a .ckpt file, or a folder that `export` or `convert` wrote, whose README.md, if it
            has one, is the card.
        repo: The repository, `owner/name`.
        to: The layout to convert to, as for `convert`; null for that of the folder, and for a run the one of `export`.
        evaluation: A folder that `evaluate` wrote; the rows of this model go into the card and evaluation.jsonl.
        private: Whether a new repository is private.
        dry_run: Only show the files, their sizes and the card.
        trust: Whether to import and call what the model's config names, even if someone else wrote it.
        overwrite: Whether to replace the model in a repository of yours, whose history keeps it.

    Returns:
        The files, the card and the address.

    Raises:
        UserError: The model or the evaluation does not exist or is damaged; the folder has a file that is not part of a
            model, or one with a secret; a token, the network or the right to write is missing; the repository exists.
            The message says what is in the repository.
    """
    if not _REPOSITORY.fullmatch(repo):
        raise UserError(f"repo: {repo!r} must be owner/name, of letters, digits, '-', '_' and '.'")
    source = Path(checkpoint)
    if on_hub(checkpoint) and to is None:
        raise UserError(f"checkpoint: {checkpoint} is on the Hub already; choose another layout by ", Option("to"))
    with TemporaryDirectory(prefix="zoo-publish-") as temporary:
        folder = Path(temporary) / repo.partition("/")[2]
        if to is not None:
            convert(checkpoint, folder, to=to, trust=trust)
        elif has_tensor_files(source):
            folder = source
        else:
            export(checkpoint, folder, trust=trust)
        paths = _files_of(folder)
        card = _card(folder, checkpoint, repo, trust)
        files: dict[str, Path | bytes] = {**paths}
        if evaluation is not None:
            records = _records(Path(evaluation), {_identity(path, trust) for path in (checkpoint, folder)})
            files[EVALUATION] = "".join(f"{json.dumps(record)}\n" for record in records).encode()
            card += _evaluation_table(records)
        files[CARD] = card.encode()
        sizes = {n: len(f) if isinstance(f, bytes) else f.stat().st_size for n, f in sorted(files.items())}
        if dry_run:
            return Publication(repo, sizes, card)
        return Publication(repo, sizes, card, _upload(repo, files, private, overwrite))


def _files_of(folder: Path) -> dict[str, Path]:
    """Name → file of a model's folder; a UserError if anything else is in it, or a secret."""
    files: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or not path.is_file():
            raise UserError(f"checkpoint: {path} is a link or a folder, and only files are published; move it away")
        if not WEIGHTS.fullmatch(path.name) and path.name not in _NAMES:
            raise UserError(
                f"checkpoint: {path} is not a file of a model, so nothing is published; move it away (allowed: "
                f"weights, {', '.join(sorted(_NAMES))})"
            )
        if path.suffix != ".safetensors" and (secret := _SECRET.search(read_regular(path, _MOST_BYTES))):
            shown = secret[0][:5].decode()
            raise UserError(f"checkpoint: {path} has what looks like a secret ({shown}…), so nothing is published")
        files[path.name] = path
    return files


def _card(folder: Path, checkpoint: str | Path, repo: str, trust: bool) -> str:
    """The card in a folder, or a new one, with the name of the repository where a folder's name loads the model."""
    public = (folder / PUBLIC_CONFIG).is_file()
    if not (public and PublicFolder(folder).config().get("model_type") == MODEL_TYPE):  # which is not read back
        saved = SavedModel.open(folder, trust)
        model, _ = saved.on_meta()  # whose weights are then complete and those of the config
        if not (folder / CARD).is_file():
            if public:
                raise UserError(f"checkpoint: {folder} has no {CARD}; write one, or convert the model again")
            return model_card(repo, model, saved.config, Path(checkpoint), None).replace(
                f'zoo.load("{repo}")', f'zoo.load("hf://{repo}")'
            )
    card = read_regular(folder / CARD, _MOST_BYTES).decode(errors="replace")
    card = card.replace(f'from_pretrained("{folder.name}"', f'from_pretrained("{repo}"')
    return card.replace(f'zoo.load("{folder.name}")', f'zoo.load("hf://{repo}")')


def _identity(path: str | Path, trust: bool) -> str | None:
    """The hash of a model's weights, as `evaluate` records it; None for a folder that is not read back."""
    try:
        return SavedModel.open(path, trust).identity
    except UserError:
        return None


def _records(folder: Path, identities: set[str | None]) -> list[dict[str, Any]]:
    """Return what `evaluate` measured of a model, without paths of this machine; a UserError if there is nothing."""
    file, records = folder / ROWS, list[dict[str, Any]]()
    with errors_about("evaluation"):
        content = read_regular(file, _MOST_BYTES)
    for number, line in enumerate(content.decode(errors="replace").splitlines(), start=1):
        try:
            record = parse_record(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"evaluation: line {number} of {file} is damaged ({error})") from None
        if record.get("checkpoint_xxh3_128") in identities - {None}:
            what: dict[str, Any] = {key: record["what"].get(key) for key in ("task", "version", "cell", "precision")}
            about: dict[str, Any] = {key: record[key] for key in ("device", "torch", "zoo") if key in record}
            records.append({**what, "rows": record["rows"], **about})
    if not records:
        raise UserError(f"evaluation: {file} has no rows of this model; evaluate what is published")
    return records


def _evaluation_table(records: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a section of the card, whose table has the first of them if there are many."""
    lines = [
        f"| {record['task']} | {_words(record['cell'] or {})} | {row['metric']} | {_number(row['value'])} |"
        for record in records
        for row in record["rows"]
    ]
    more = f"\nAll {len(lines)} rows are in `{EVALUATION}`.\n" if len(lines) > _MOST_ROWS else ""
    head = "\n## Evaluation\n\n| task | setting | metric | value |\n|---|---|---|---|\n"
    return head + "\n".join(lines[:_MOST_ROWS]) + "\n" + more


def _words(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "–"


def _upload(repo: str, files: Mapping[str, Path | bytes], private: bool, overwrite: bool) -> str:
    """Commit the files to a repository that is new or empty, or may be overwritten; the address of the commit."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token
    from huggingface_hub.errors import RepositoryNotFoundError

    hub, model, api = constants.ENDPOINT, HubModel(repo, None), HfApi()
    if (token := get_token()) is None:
        raise UserError(f"repo: a token for {hub} is missing; log in by `hf auth login`, or set HF_TOKEN")
    with hub_errors("repo", model):
        who = api.whoami(token)
        owners = [who["name"], *(each["name"] for each in who.get("orgs", []))]
        if (owner := repo.partition("/")[0]) not in owners:
            raise UserError(f"repo: {owner} is neither you nor an organisation of yours ({', '.join(owners)})")
        try:
            info = api.model_info(repo, token=token)
        except RepositoryNotFoundError:
            info = None
        there = [] if info is None else [each.rfilename for each in info.siblings or []]
        if set(there) - {".gitattributes"} and not overwrite:
            raise UserError(
                f"repo: {hub}/{repo} exists and holds {len(there)} files; choose another, or replace its model by ",
                Option("overwrite", True),
            )
        if info is None:
            api.create_repo(repo, private=private, token=token)
        elif private and not info.private:
            raise UserError(f"repo: {hub}/{repo} exists and is public; `private` is for new repositories")
        parts: list[CommitOperationAdd | CommitOperationDelete] = [
            CommitOperationAdd(name, content if isinstance(content, bytes) else os.fspath(content))
            for name, content in files.items()
        ]
        replaced = [n for n in there if n not in files and (n in (*_NAMES, EVALUATION) or WEIGHTS.fullmatch(n))]
        parts += [CommitOperationDelete(name) for name in replaced if not name.startswith("LICENSE")]
        before = None if info is None else info.sha
        with _aftermath(api, model, there, token):
            commit = api.create_commit(
                repo, parts, commit_message="Upload a model", token=token, parent_commit=before or None
            )
    return str(commit.commit_url)


@contextmanager
def _aftermath(api: Any, model: HubModel, before: Sequence[str], token: str) -> Iterator[None]:
    """Add to an error of an upload what is in the repository after it."""

    def state() -> str:
        try:
            with hub_errors("repo", model):
                names = [each.rfilename for each in api.model_info(model.repo, token=token).siblings or []]
        except UserError:
            return f"{model.repo} has all of the new files or none, as they are one commit; the Hub does not answer now"
        if set(names) == set(before):
            return f"{model.repo} holds the {len(names)} files that it held before, and no new one"
        if not set(names) - {".gitattributes"}:
            return f"{model.repo} was created and holds no file of the model"
        return f"{model.repo} holds {', '.join(sorted(names))}"

    try:
        with hub_errors("repo", model):
            yield
    except KeyboardInterrupt:
        log.warning("interrupted: %s.", state())
        raise
    except (UserError, OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise UserError(f"{'' if isinstance(error, UserError) else 'repo: '}{reason}; {state()}") from None
