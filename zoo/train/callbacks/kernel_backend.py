"""`backend` and `deterministic_kernels`: which implementations of the ops a training run uses."""

from contextlib import ExitStack
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

import kernels


class KernelBackend(Callback):
    """Runs the ops of a whole training run on one backend and in one mode; checkpoints can be continued in others.

    Args:
        name: One of `kernels.BACKENDS`; None for the one in force.
        deterministic: Whether the mode of `kernels.deterministic` is on; None for the one in force.
    """

    order = 0

    def __init__(self, name: str | None, deterministic: bool | None = None) -> None:
        self.name, self.deterministic = name, deterministic
        self._entered = ExitStack()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self.name is not None:
            self._entered.enter_context(kernels.backend(self.name))
        if self.deterministic is not None:
            self._entered.enter_context(kernels.deterministic(self.deterministic))

    def teardown(self, *_: Any, **__: Any) -> None:
        """Return to the backend and the mode of before."""
        self._entered.close()

    on_exception = teardown
