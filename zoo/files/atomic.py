"""Atomic replacement of a file: readers see either the old content or the new one."""

import ctypes
import glob
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from zoo.files.links import open_in_place

_ABANDONED = 3600  # seconds without changes after which another machine's temporary file counts as abandoned
_HERE, _EXCHANGE = -100, 2  # of Linux: AT_FDCWD, RENAME_EXCHANGE
_WRITER = re.compile(r"([^.]+)\.([0-9]+)\.[0-9]+\.partial")  # the end of a name by `_partial`


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a temporary file next to `path`, which replaces `path` when the block ends without an error.

    The temporary file is in the same folder, which is created if needed, since only a rename within one file system is
    atomic. Its name is unique to the writer, so that concurrent writers do not mix their contents. Temporary files of
    killed writers are removed first.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path)
    partial = _partial(path)
    try:
        with open_in_place(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # otherwise a power cut after the rename may leave an empty file
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)  # makes the rename durable


def atomic_link(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Give the content of `source` a second name, by a hard link if the file system has them, otherwise by a copy.

    A later `atomic_write` to `source` does not change `target`, because it replaces the name and not the content.
    """
    source, target = Path(source), Path(target)
    _remove_abandoned(target)
    partial = _partial(target)
    partial.unlink(missing_ok=True)
    try:
        os.link(source, partial)
    except OSError:
        with open(source, "rb") as read, atomic_write(target) as write:
            while block := read.read(1 << 24):
                write.write(block)
        return
    os.replace(partial, target)
    partial.unlink(missing_ok=True)  # if both names already referred to the same file, the rename did nothing
    sync(target.parent)


def _partial(path: Path) -> Path:
    """The temporary file of this thread: `.NAME.MACHINE.PROCESS.THREAD.partial`."""
    return path.with_name(f".{path.name}.{_machine()}.{os.getpid()}.{threading.get_ident()}.partial")


def _machine() -> str:
    return socket.gethostname().replace(".", "-")


def _remove_abandoned(path: Path) -> None:
    """Remove the temporary files of dead writers of `path`."""
    for partial in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
        written = _WRITER.fullmatch(partial.name.removeprefix(f".{path.name}."))
        if written is None:  # someone else's file
            continue
        machine, process = written.groups()
        try:
            if machine == _machine() and os.name != "nt":
                os.kill(int(process), 0)  # raises if the process does not exist
            elif time.time() - partial.stat().st_mtime > _ABANDONED:
                partial.unlink()
        except ProcessLookupError:
            with suppress(OSError):  # already gone, or a folder of this name
                partial.unlink()
        except (OSError, OverflowError):
            continue  # already gone, or the process is another user's


def exchange_folders(first: Path, second: Path) -> None:
    """Exchange the names of two folders of one file system: in one step on Linux, elsewhere in three renames.

    Where it takes three, a kill between them leaves the content of `second` next to `first`, under the name `.aside`.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    names = (os.fsencode(first), os.fsencode(second))
    if renameat2 is not None and renameat2(_HERE, names[0], _HERE, names[1], _EXCHANGE) == 0:
        sync(first.parent)
        sync(second.parent)
        return
    # another system, an old C library, or a file system that cannot do it
    aside = first.with_name(".aside")
    second.rename(aside)
    try:
        first.rename(second)
    except OSError:
        aside.rename(second)
        raise
    aside.rename(first)


def sync(path: Path) -> None:
    """Wait until a file is on the disk, or the names in a folder, which Windows cannot sync."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_all(folder: Path) -> None:
    """Wait until a folder, and all that is in it, is on the disk."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)
