"""The hashes of an exported folder: which files it has, and what is in them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernels import UserError

from .seal import digest, file_digest

NAME = "hashes.json"
_LARGEST = 1 << 20  # bytes that are read of it


def hashes(files: Mapping[str, bytes], signature: str | None) -> bytes:
    """What `hashes.json` holds.

    Args:
        files: Name → content, of the folder.
        signature: Of the config.
    """
    described = {name: {"bytes": len(content), "xxh3_128": digest(content)} for name, content in files.items()}
    return _rendered({"files": described, "signature": signature})


def check_hashes(folder: Path) -> str | None:
    """Compare the files of an exported folder with its `hashes.json`; without one, nothing is known of them.

    Returns:
        The signature of the config.

    Raises:
        UserError: A file is missing or damaged.
    """
    file = folder / NAME
    if not file.exists():
        return None
    contents = _contents(file)
    for name, described in contents["files"].items():
        path = folder / name
        if Path(name).name != name:
            raise UserError(f"{file} is refused: {name} is not in its folder.")
        if not path.is_file():
            raise UserError(f"{folder} is incomplete: {name} is missing.")
        if path.stat().st_size != described["bytes"] or file_digest(path) != described["xxh3_128"]:
            raise UserError(
                f"{path} is damaged: its bytes are not those that were exported (if you changed it yourself, "
                f"delete {file})."
            )
    return contents["signature"]


def _contents(file: Path) -> dict[str, Any]:
    damaged = UserError(f"{file} is damaged; without it, the files beside it are loaded unchecked.")
    try:
        with open(file, "rb") as opened:
            written = opened.read(_LARGEST)
        contents = json.loads(written)
        del contents["xxh3_128"]
        whole = written == _rendered(contents)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):  # no JSON, or another one
        raise damaged from None
    if not whole:
        raise damaged
    return contents


def _rendered(contents: dict[str, Any]) -> bytes:
    """As JSON, with a hash of the rest in it."""
    own = digest(json.dumps(contents).encode())
    return (json.dumps({**contents, "xxh3_128": own}, indent=1) + "\n").encode()
