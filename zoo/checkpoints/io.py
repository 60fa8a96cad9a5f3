"""Atomic writing of checkpoint files, as a Lightning plug-in."""

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.fabric.plugins.io import TorchCheckpointIO

from zoo.checkpoints.archive import save_sealed
from zoo.checkpoints.background import Background, host_copy
from zoo.checkpoints.format import not_written, read_whole_checkpoint
from zoo.files.atomic import atomic_write


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a temporary file next to the target, syncs it to disk, then renames it; reads with clear errors.

    Lightning's writer keeps a second copy of the checkpoint in memory, writes it to the system's temporary folder and
    moves it from there, which is a plain copy if that folder is on another file system, and never syncs.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write `checkpoint` to the local file `path`; an existing file stays until the new one is complete.

        If `storage_options` is a `Background`, the checkpoint is copied now and written by that thread.

        Raises:
            UserError: The file cannot be written.
            TypeError: `storage_options` is anything else.
        """
        if isinstance(storage_options, Background):
            storage_options.add(partial(_write, host_copy(checkpoint), path))
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
    try:
        with atomic_write(path) as file:
            save_sealed(checkpoint, file)
    except OSError as error:
        raise not_written(path, error) from error
