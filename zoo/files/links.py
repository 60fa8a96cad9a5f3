"""Folders from elsewhere may hold symbolic links: nothing is written through one.

A file that is written as a whole is replaced (`atomic.py`), and so is a link in its place. A file that is appended to
or locked is opened here.
"""

import errno
import logging
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal, TextIO, overload

from filelock import FileLock, Timeout

from kernels.errors import UserError

log = logging.getLogger(__name__)

# filelock's record of the process that holds a lock, on file systems without `flock`
_HOLDER = re.compile(rb"\d+\n[^\n]+\n(\d+\n)?|filelock/released\n")
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)  # Windows has neither, and no links without special rights
_NO_WAITING = getattr(os, "O_NONBLOCK", 0)  # a pipe would otherwise wait for its reader


@overload
def open_in_place(path: str | os.PathLike[str], mode: Literal["a"]) -> TextIO: ...
@overload
def open_in_place(path: str | os.PathLike[str], mode: Literal["ab", "ab+", "r+b", "wb"]) -> BinaryIO: ...
def open_in_place(path: str | os.PathLike[str], mode: str) -> IO[Any]:
    """Open a file to change or extend it, with a mode of `open`; text is UTF-8.

    A UserError if its name is a symbolic link, a pipe or a device.
    """

    def opener(name: str, flags: int) -> int:
        try:
            descriptor = os.open(name, flags | _NO_FOLLOW | _NO_WAITING, 0o666)
        except OSError as error:
            if error.errno == errno.ELOOP or (error.errno == errno.ENXIO and not os.path.isfile(name)):
                raise _not_regular(path) from None
            raise
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise _not_regular(path)
        return descriptor

    return open(path, mode, encoding=None if "b" in mode else "utf-8", opener=opener)


def check_in_place(path: str | os.PathLike[str]) -> None:
    """Raise a UserError if `path` exists and `open_in_place` would refuse it."""
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise _not_regular(path)


def lock_of(path: str | os.PathLike[str]) -> FileLock:
    """A lock in the file `path`, which is created; a UserError if it is a link, a pipe or a device, or has content."""
    check_in_place(path)
    if os.path.exists(path) and os.path.getsize(path) and not _names_holder(path):
        raise UserError(f"{path} is not a lock, as it has content; move it, or choose another folder.")
    return FileLock(path)


def _names_holder(path: str | os.PathLike[str]) -> bool:
    """Return whether the content of a file is that of a lock on a file system without `flock`."""
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:  # released meanwhile
        return True
    return not content or _HOLDER.fullmatch(content) is not None


@contextmanager
def held_lock(path: str | os.PathLike[str], busy: str) -> Iterator[None]:
    """Hold the lock in the file `path` during the block; a file system without locks is only warned about.

    Raises:
        UserError: Another process holds the lock; the message is then `busy`. Or the file is a link, a pipe or a
            device, or has content that no lock has.
    """
    lock = lock_of(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(busy) from None
    except (OSError, NotImplementedError) as error:  # some network file systems have no locks
        log.warning("%s cannot be locked (%s); start only one process for its folder at a time", path, error)
    try:
        yield
    finally:
        lock.release()


def check_inside(file: Path, folder: Path) -> None:
    """Refuse a link that leaves a folder by a UserError; one to the blobs of Hugging Face's cache does not."""
    target, home = file.resolve(), folder.resolve()
    blobs = [parent.parent / "blobs" for parent in (home, *home.parents) if parent.name == "snapshots"]
    if not target.is_relative_to(home) and target.parent not in blobs:
        raise UserError(f"checkpoint: {file} is refused: it is a link that leaves its folder.")


def _kind(mode: int) -> str:
    kinds = {stat.S_IFLNK: "symbolic link", stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}
    return kinds.get(stat.S_IFMT(mode), "device")


def _not_regular(path: str | os.PathLike[str]) -> UserError:
    what = _kind(os.lstat(path).st_mode)
    return UserError(f"{path} is a {what}, and nothing is written through one; put a file in its place, or remove it.")
