"""Outputs of verbs. `overwrite` allows to replace a model of the same kind, nothing else.

Verbs that continue or repeat a measurement have no `overwrite`: they replace files of their own records only.
"""

import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from kernels.errors import Option, UserError
from zoo.files.atomic import sync

Kind = Literal["an exported model", "a public model", "a GGUF file"]
EMPTY = "an empty folder"
WEIGHTS = re.compile(r"model(-[0-9]{5}-of-[0-9]{5})?\.safetensors|model\.safetensors\.index\.json")

# files of a model, next to its weights, that another model may not have
OF_A_MODEL = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"),
    "modeling_zoo.py",
)
CONFIG_HEADER = b"# The complete config of this run; fit --config accepts it as is.\n"  # of a run's config.yaml
CARD = "README.md"  # the model card


def check_output(path: Path, kind: Kind, overwrite: bool, source: str | Path | None = None) -> None:
    """Raise a UserError if something is at the path of an output that it may not replace.

    Only an output of the same kind may be replaced, with `overwrite`, and never the `source` that is read meanwhile.
    """
    there = _there(path)
    if there is None:
        return
    if source is not None and os.path.exists(source) and os.path.exists(path) and os.path.samefile(source, path):
        raise UserError(f"output: {path} is the checkpoint that is read; choose another output")
    if there not in (kind, EMPTY):
        raise UserError(f"output: {path} exists already and is {there}, which is never replaced; choose another")
    if not overwrite:
        raise UserError(
            f"output: {path} exists already and is {there}; choose another, or replace it by ",
            Option("overwrite", True),
        )


def check_record(file: Path, entries: Iterable[str], option: str, kind: str) -> None:
    """Raise a UserError if a file exists and is not a JSON object with these entries, as a `kind` of record is."""
    if not os.path.lexists(file):
        return
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or not {*entries} <= {*record}:
        raise UserError(f"{option}: {file} exists and is not a record of {kind}; choose another {option}")


def check_no_others(files: Iterable[Path], option: str, record: str) -> None:
    """Raise a UserError if a file exists that a verb would write next to its record, which the folder does not have."""
    for file in files:
        if os.path.lexists(file):
            raise UserError(
                f"{option}: {file} exists, but the folder has no {record}, so it is not replaced; "
                f"move it, or choose another {option}"
            )


def is_config_of_run(file: Path) -> bool:
    """Return whether a file is a `config.yaml` that a run wrote."""
    if not file.is_file():
        return False
    with open(file, "rb") as opened:
        return opened.read(len(CONFIG_HEADER)).startswith(CONFIG_HEADER)


def make_folder(folder: Path, option: str) -> None:
    """Create a folder; a UserError that begins with `option` if it cannot be created or is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{option}: the folder {folder} cannot be created: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise UserError(f"{option}: the folder {folder} cannot be written to")


def check_shard_size(max_bytes: int) -> None:
    """Refuse a `max_shard_size` below 1 byte."""
    if max_bytes < 1:
        raise UserError(f"max_shard_size: {max_bytes} must be at least 1 byte")


def _there(path: Path) -> str | None:
    """Describe the file or folder at a path; None if there is none."""
    if path.is_symlink():
        return "a link"
    if not path.exists():
        return None
    if path.is_file():
        with open(path, "rb") as file:
            return "a GGUF file" if file.read(4) == b"GGUF" else "a file"
    if not path.is_dir():
        return "a file"
    names = {entry.name for entry in path.iterdir()}
    weights = any(WEIGHTS.fullmatch(name) for name in names)
    if names & {"checkpoints", "metrics.jsonl"} or any(name.endswith(".ckpt") for name in names):
        return "the folder of a run"
    if "config.yaml" in names and "config.json" not in names and weights:
        return "an exported model"
    if "config.json" in names and "config.yaml" not in names and weights:
        return "a public model"
    return f"a folder that holds {min(names)}" if names else EMPTY


def keep_others(folder: Path, new: Path) -> None:
    """Give the files that an old folder has besides a model a second name in the new folder.

    A README.md, which may have been edited, becomes README.old.md there.
    """
    written = {path.name for path in new.iterdir()}
    for path in sorted(folder.iterdir()):
        if path.name == CARD in written and path.read_bytes() != (new / CARD).read_bytes():
            numbers = ("old", *(f"old{number}" for number in range(2, 1000)))
            free = (f"README.{number}.md" for number in numbers)
            _link(path, new / next(name for name in free if not (folder / name).exists()))
        if path.name in written or path.name in OF_A_MODEL or WEIGHTS.fullmatch(path.name):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, new / path.name, symlinks=True, copy_function=_link)
        else:
            _link(path, new / path.name)
    shutil.copymode(folder, new)
    for parent, _, _ in os.walk(new):  # contents are on the disk already
        sync(Path(parent))


def _link(source: str | Path, target: str | Path) -> None:
    """Give a file a second name, or copy it where the file system has no hard links."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)
