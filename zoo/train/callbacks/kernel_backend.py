"""`backend`: which implementations of the ops a training run uses."""

from contextlib import ExitStack
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

import kernels


class KernelBackend(Callback):
    """Runs the ops of a whole training run on one backend; its checkpoints do not depend on it.

    Args:
        name: One of `kernels.BACKENDS`.
    """

    order = 0

    def __init__(self, name: str) -> None:
        self.name = name
        self._entered = ExitStack()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._entered.enter_context(kernels.backend(self.name))

    def teardown(self, *_: Any, **__: Any) -> None:
        """Return to the backend of before."""
        self._entered.close()

    on_exception = teardown
