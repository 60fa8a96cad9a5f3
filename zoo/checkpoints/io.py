"""Lightning's interface to checkpoint files, with this project's format. Importing it imports Lightning."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.io import TorchCheckpointIO

from kernels.errors import UserError
from zoo.checkpoints.archive import save_sealed
from zoo.checkpoints.background import Background
from zoo.checkpoints.format import read_whole_checkpoint
from zoo.files.atomic import atomic_write


def not_written(path: str | os.PathLike[str], error: OSError) -> UserError:
    """The error to raise if a checkpoint cannot be written: the disk is full, read-only or gone."""
    reason = error.strerror or " ".join(str(error).split())
    earlier = "the one saved there before is kept" if Path(path).exists() else "none was saved there before"
    return UserError(f"the checkpoint {path} cannot be written: {reason}; {earlier}.")


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a temporary file next to the target, syncs it to disk, then renames it; reads with clear errors.

    Lightning's writer keeps a second copy in memory, moves it from another folder, and never syncs.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write `checkpoint` to the local file `path`; an existing file stays until the new one is complete.

        If `storage_options` is a `Background`, the checkpoint is copied now and written by that thread. A UserError if
        the file cannot be written.
        """
        if isinstance(storage_options, Background):
            copied = storage_options.copy(checkpoint, checkpoint["global_step"])
            storage_options.add(partial(_write, copied, path))
        elif storage_options is not None:
            raise TypeError("storage_options are not supported: checkpoints are written to local files")
        else:
            _write(checkpoint, path)

    def load_checkpoint(
        self, path: Any, map_location: Callable | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint of this project onto the CPU; no code in it is run, whatever `weights_only` says."""
        return read_whole_checkpoint(path, map_location or "cpu")


def _write(checkpoint: dict[str, Any], path: Any) -> None:
    if Path(path).parent.is_symlink():  # since the run began: it may lead to the checkpoints of another one
        raise UserError(f"the checkpoint {path} is not written: {Path(path).parent} is a link; put a folder there.")
    try:
        with atomic_write(path) as file:
            save_sealed(checkpoint, file)
    except OSError as error:
        raise not_written(path, error) from error
