"""Replace a file all at once: whoever reads it sees the old content or the new one, never a part."""

import glob
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_ABANDONED = 3600  # seconds without a change after which a temporary file of another machine is nobody's


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path`, which takes the place of `path` when the block ends without an error.

    The temporary file lies in the same folder, since only a rename within one file system is atomic. Its name is the
    writer's own, so that of two at a time one wins and neither has a part of the other; what writers left there that
    were killed is removed first, instead of piling up.

    Args:
        path: The file to write. Its folder is created if need be.

    Yields:
        The temporary file, open for writing bytes.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path)
    partial = _partial(path)
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
    partial.unlink(missing_ok=True)  # if both were the same file already, the rename did nothing
    _sync_folder(target.parent)


def _partial(path: Path) -> Path:
    """The temporary file of this thread: `.NAME.MACHINE.PROCESS.THREAD.partial`."""
    return path.with_name(f".{path.name}.{_machine()}.{os.getpid()}.{threading.get_ident()}.partial")


def _machine() -> str:
    return socket.gethostname().replace(".", "-")


def _remove_abandoned(path: Path) -> None:
    """Remove the temporary files of writers of `path` that are no more."""
    for partial in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
        machine, process = partial.name.removeprefix(f".{path.name}.").split(".")[:2]
        try:
            if machine == _machine() and process.isdecimal() and os.name != "nt":
                os.kill(int(process), 0)  # raises if there is no such process
            elif time.time() - partial.stat().st_mtime > _ABANDONED:
                partial.unlink()
        except ProcessLookupError:
            partial.unlink(missing_ok=True)
        except (OSError, OverflowError):
            continue  # gone by now, or of a process that is not ours


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable; Windows has no such call."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
