"""Replace a file all at once: whoever reads it sees the old content or the new one, never a part."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path`, which takes the place of `path` when the block ends without an error.

    The temporary file lies in the same folder, since only a rename within one file system is atomic, and has a fixed
    name, so that what a killed process left there is overwritten by the next write instead of piling up.

    Args:
        path: The file to write. Its folder is created if need be.

    Yields:
        The temporary file, open for writing bytes.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # else a power cut after the rename can leave an empty file under the final name
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def atomic_link(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Give the content of `source` a second name, without copying it where the file system can link.

    A later `atomic_write` to `source` leaves `target` as it is, because it replaces the name and not the content.
    """
    source, target = Path(source), Path(target)
    partial = target.with_name(f".{target.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        os.link(source, partial)
    except OSError:
        with open(source, "rb") as read, atomic_write(target) as write:
            while block := read.read(1 << 24):
                write.write(block)
        return
    os.replace(partial, target)
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable; Windows has no such call."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
