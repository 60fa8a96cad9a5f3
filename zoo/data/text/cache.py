"""The cache of prepared data: its location, and building a folder exactly once and atomically."""

import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import Timeout

from kernels.errors import UserError
from zoo.files.links import lock_of

log = logging.getLogger(__name__)

_TEMPORARY = re.compile(r"\.[a-z0-9_]{8}")  # the end of a name by `mkdtemp`


def cache_folder() -> Path:
    """`$ZOO_CACHE`, or else `$XDG_CACHE_HOME/zoo`, or else `~/.cache/zoo`. The folder may not exist yet."""
    if folder := os.environ.get("ZOO_CACHE"):
        return Path(folder).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser().absolute() / "zoo"


def build_once(folder: Path, build: Callable[[Path], None], *, resumable: bool = False, key: str = "ZOO_CACHE") -> Path:
    """Return `folder`; if it is missing, call `build` to fill a temporary folder, and rename that.

    Several processes may call this at the same time: one builds, the others wait for it.

    Args:
        folder: The folder to build.
        build: Fills the folder it is given.
        resumable: Whether `build` can continue from a folder that an interruption left partly filled.
        key: The config key or environment variable that sets the location, for messages.

    Raises:
        UserError: The folder is not writable.
    """
    if folder.is_dir():  # without locking, so that a complete cache may be read-only
        return folder
    temporary = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = lock_of(folder.with_name(folder.name + ".lock"))
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
                if temporary.is_symlink():  # what it holds may be deleted
                    raise UserError(f"{temporary} is a symbolic link, and nothing is written through one; remove it.")
            else:
                for stale in folder.parent.glob(f".{folder.name}.*"):
                    if _TEMPORARY.fullmatch(stale.suffix):  # left by a killed process, since we hold the lock
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
        if not resumable and temporary is not None and temporary.is_dir():  # it only exists after a failure or Ctrl-C
            shutil.rmtree(temporary, ignore_errors=True)
    return folder
