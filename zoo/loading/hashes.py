"""`hashes.json`, which lists the files of an exported folder with their sizes and hashes."""

from collections.abc import Mapping
from pathlib import Path

from kernels import UserError
from zoo.files.hashing import digest, file_digest
from zoo.files.links import open_to_read
from zoo.files.sealed_json import sealed, unsealed

NAME = "hashes.json"
_LARGEST = 1 << 20  # bytes that are read of the file, at most


def hashes(files: Mapping[str, bytes | Path], signature: str | None) -> bytes:
    """The contents of `hashes.json`.

    Args:
        files: File name → content, or where it is written already.
        signature: The signature of the config.
    """
    return sealed({"files": {name: _described(content) for name, content in files.items()}, "signature": signature})


def _described(content: bytes | Path) -> dict[str, int | str]:
    if isinstance(content, Path):
        return {"bytes": content.stat().st_size, "xxh3_128": file_digest(content)}
    return {"bytes": len(content), "xxh3_128": digest(content)}


def check_hashes(folder: Path) -> str | None:
    """Compare the files of an exported folder with its `hashes.json`, if it has one.

    Returns:
        The signature of the config; None without one.

    Raises:
        UserError: A file is missing or damaged.
    """
    file = folder / NAME
    if not file.exists():
        return None
    advice = "without it, the files in its folder are loaded unchecked"
    try:
        with open_to_read(file) as opened:
            written = opened.read(_LARGEST)
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}); {advice}.") from None
    contents = unsealed(written, str(file), advice=advice)
    files = contents.get("files")
    if sealed(contents) != written or not isinstance(files, dict):  # the seal does not cover white space
        raise UserError(f"{file} is damaged (it is not as it was written); {advice}.")
    for name, described in files.items():
        path = folder / name
        if Path(name).name != name:
            raise UserError(f"{file} is refused: {name} is not in its folder.")
        if not path.is_file():
            raise UserError(f"{folder} is incomplete: {name} is missing.")
        if _described(path) != described:
            raise UserError(
                f"{path} is damaged: its bytes are not those that were exported (if you changed it yourself, "
                f"delete {file})."
            )
    return contents.get("signature")
