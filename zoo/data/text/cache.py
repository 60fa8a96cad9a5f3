"""The cache of prepared data: its location, and building a folder exactly once and atomically."""

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import Timeout

from kernels.errors import UserError
from zoo.files.links import lock_of

log = logging.getLogger(__name__)


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
    temporary = folder.with_name(f".{folder.name}.partial")
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
            if temporary.is_symlink():  # what it holds may be deleted
                raise UserError(f"{temporary} is a symbolic link, and nothing is written through one; remove it.")
            if temporary.is_dir() and not resumable:  # left by a killed process, since this one holds the lock
                shutil.rmtree(temporary)
            temporary.mkdir(exist_ok=True)
            try:
                build(temporary)
            except BaseException:
                if not resumable:
                    shutil.rmtree(temporary, ignore_errors=True)
                raise
            os.replace(temporary, folder)
        finally:
            lock.release()
    except OSError as error:
        raise UserError(
            f"the {'cache ' if key == 'ZOO_CACHE' else ''}folder {folder.parent} cannot be written "
            f"({error.strerror or error}); set {key} to a folder that can, with enough space."
        ) from error
    return folder
