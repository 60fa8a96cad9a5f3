"""Models on the Hugging Face Hub, `hf://owner/name[@revision]`: downloads of the files that a model is read from."""

import glob
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kernels import UserError
from zoo.checkpoints import pickled
from zoo.checkpoints.tensor_files import INDEX, SINGLE, has_tensor_files, read_index
from zoo.saved.exported_folder import CONFIG, HASHES, TOKENIZER
from zoo.saved.public.folder import CONFIG as PUBLIC_CONFIG
from zoo.saved.public.tokenizer import DESCRIPTION, GENERATION

ON_HUB = "hf:/"  # `Path` turns two slashes into one
_ADDRESS = re.compile(r"hf:/+(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
_SMALL = (CONFIG, PUBLIC_CONFIG, HASHES, TOKENIZER, DESCRIPTION, GENERATION, INDEX, pickled.INDEX)


class HubModel(NamedTuple):
    """A repository of the Hub; `revision` is a branch, a tag or a commit, None the main branch."""

    repo: str
    revision: str | None

    def __str__(self) -> str:
        return f"hf://{self.repo}" + ("" if self.revision is None else f"@{self.revision}")


def hub_model(path: str | Path) -> HubModel:
    """Return the repository that a path `hf://…` names; a UserError if it names none."""
    match = _ADDRESS.fullmatch(str(path))
    if match is None or {"", ".", ".."} & {*(match["revision"] or "main").split("/")}:
        raise UserError(f"checkpoint: {path} must be hf://owner/name or hf://owner/name@revision")
    return HubModel(match["repo"], match["revision"])


def downloaded(path: str | Path) -> Path:
    """Download a model `hf://owner/name` into the cache of huggingface_hub, and return the folder.

    Of the repository, config, tokenizer and weights are downloaded. The weights are safetensors or, without them,
    `pytorch_model.bin`, from which only tensors are unpickled.

    Nothing else is downloaded, and what the cache has is not downloaded again: without a network, a model in the cache
    opens as before. Nothing is parsed but the index of the weights; the folder is vetted like any other.

    Raises:
        UserError: The repository, revision or a file does not exist, or cannot be reached.
    """
    model = hub_model(path)
    folder = _fetched(model, _SMALL)
    if not any((folder / name).is_file() for name in (CONFIG, PUBLIC_CONFIG)):
        raise UserError(f"checkpoint: {model} holds no model: neither {PUBLIC_CONFIG} nor {CONFIG} is in it")
    revision = HubModel(model.repo, folder.name)  # the same commit
    folder = _fetched(revision, _indexed(folder / INDEX, SINGLE))
    if not has_tensor_files(folder):
        folder = _fetched(revision, _indexed(folder / pickled.INDEX, pickled.SINGLE, ".bin"))
    if not (has_tensor_files(folder) or pickled.has_pickles(folder)):
        raise UserError(f"checkpoint: {model} has no weights: neither {SINGLE}, {pickled.SINGLE} nor an index is in it")
    return folder


def _indexed(index: Path, single: str, suffix: str = ".safetensors") -> list[str]:
    """Return the names of the files with weights: those that the index names, or the single one without an index."""
    return sorted(set(read_index(index, suffix).values())) if index.is_file() else [single]


def _fetched(model: HubModel, names: Sequence[str]) -> Path:
    """The folder of a snapshot in the cache that has those of the files that the repository has."""
    from huggingface_hub import constants, errors, snapshot_download

    hub, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
    page = f"{hub}/{model.repo}"
    unopened = f"the repository {model.repo} does not exist at {hub}, or your token does not open it"
    reasons: dict[type[Exception], str] = {  # the first that an error is an instance of counts
        errors.HFValidationError: f"{model.repo!r} cannot be the name of a repository of the Hub",
        errors.GatedRepoError: f"{model} is gated; accept its terms at {page}, and log in by `hf auth login`",
        errors.RevisionNotFoundError: f"{model.repo} has no branch, tag or commit {model.revision!r} at {hub}",
        errors.RepositoryNotFoundError: unopened,
        errors.LocalEntryNotFoundError: f"{hub} cannot be reached, and the cache {cache} does not hold all of {model}",
        errors.OfflineModeIsEnabled: f"HF_HUB_OFFLINE is set, so {hub} is not asked about {model.repo}",
    }
    patterns = [glob.escape(name) for name in names]
    try:
        return Path(snapshot_download(model.repo, revision=model.revision, allow_patterns=patterns))
    except tuple(reasons) as error:
        reason = next(text for kind, text in reasons.items() if isinstance(error, kind))
        raise UserError(f"checkpoint: {reason}") from None
    except errors.HfHubHTTPError as error:
        raise UserError(f"checkpoint: {hub} refuses {model.repo}: {_first_line(error)}") from None
    except errors.HTTPError as error:  # of the transport
        raise UserError(f"checkpoint: {hub} cannot be reached ({_first_line(error)})") from None


def _first_line(error: Exception) -> str:
    message = getattr(error, "server_message", None) or str(error)
    return next(iter(message.strip().splitlines()), type(error).__name__).rstrip(".")
