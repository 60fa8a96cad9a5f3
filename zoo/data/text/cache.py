"""Where prepared data lies, and how a folder of it comes into being: once, and as a whole or not at all."""

import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from kernels.errors import UserError

log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """The folder of `ZOO_CACHE`, else `zoo` in `XDG_CACHE_HOME`, else `~/.cache/zoo`. It need not exist yet."""
    if folder := os.environ.get("ZOO_CACHE"):
        return Path(folder).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser().absolute() / "zoo"


def build_once(folder: Path, build: Callable[[Path], None], *, resumable: bool = False, key: str = "ZOO_CACHE") -> Path:
    """Return `folder`; where it is missing, let `build` fill a temporary one that then takes its name.

    Several processes may call this at once: one builds, the others wait for it.

    Args:
        folder: What is to come into being.
        build: Fills a folder.
        resumable: Whether `build` goes on with what it left when it was interrupted; else that is thrown away.
        key: What says where the folder lies.

    Raises:
        UserError: the folder cannot be written.
    """
    if folder.is_dir():  # needs no lock, so a complete cache may be read-only
        return folder
    temporary = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_name(folder.name + ".lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            log.info("Waiting for another process that prepares %s.", folder)
            lock.acquire()
        try:
            if folder.is_dir():
                return folder
            if resumable:
                temporary = folder.with_name(f".{folder.name}.partial")
                temporary.mkdir(exist_ok=True)
            else:
                for stale in folder.parent.glob(f".{folder.name}.*"):  # of a killed process: we hold the lock
                    shutil.rmtree(stale, ignore_errors=True)
                temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
            build(temporary)
            os.replace(temporary, folder)
        finally:
            lock.release()
    except OSError as error:
        raise UserError(
            f"the {'cache ' if key == 'ZOO_CACHE' else ''}folder {folder.parent} cannot be written "
            f"({error.strerror or error}); set {key} to a folder that can, with enough space."
        ) from error
    finally:
        if not resumable and temporary is not None and temporary.is_dir():  # still there only after a failure or Ctrl-C
            shutil.rmtree(temporary, ignore_errors=True)
    return folder
