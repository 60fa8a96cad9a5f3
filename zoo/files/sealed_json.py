"""JSON files that only this program writes, with a hash of their content, so that damage is detected."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from kernels.errors import UserError
from zoo.files.atomic import atomic_write

SEAL = "blake2b"  # the entry that holds the hash of all the others


def write_sealed(path: str | os.PathLike[str], content: dict[str, Any]) -> None:
    """Write `content` as indented JSON with its seal, atomically."""
    with atomic_write(path) as file:
        file.write(sealed(content))


def read_sealed(path: str | os.PathLike[str], *, advice: str = "delete it or restore a copy") -> dict[str, Any]:
    """Read a file of `write_sealed`, without the seal; a UserError if it is missing, cannot be read or is damaged.

    Args:
        path: The file.
        advice: What the user can do, as the end of the error message.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); {advice}.") from error
    return unsealed(data, str(path), advice=advice)


def sealed(content: dict[str, Any]) -> bytes:
    """The bytes of a sealed file with `content`."""
    if SEAL in content:
        raise ValueError(f"the entry {SEAL!r} is taken by the seal")
    plain = json.loads(json.dumps(content))  # as it will be read back: keys are strings, tuples are lists
    return json.dumps({**plain, SEAL: _digest(plain)}, indent=2).encode()


def unsealed(data: bytes, name: str, *, advice: str = "delete it or restore a copy") -> dict[str, Any]:
    """As `read_sealed`, but from bytes; `name` is the file's name in errors."""
    try:
        content = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        reason = "it is empty" if not data.strip() else f"it is not JSON: {error}"
        raise UserError(f"{name} is damaged ({reason}); {advice}.") from error
    if not isinstance(content, dict):
        raise UserError(f"{name} is damaged (it holds no JSON object); {advice}.")
    if SEAL not in content:
        raise UserError(f"{name} is damaged (it has lost the hash of its content); {advice}.")
    if content.pop(SEAL) != _digest(content):
        raise UserError(f"{name} is damaged (its content does not match its hash); {advice}.")
    return content


def _digest(content: dict[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()
