"""Replacing the forward functions of blocks during steps of training, and only then."""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import lightning as L
from lightning.pytorch.callbacks import Callback
from torch import nn

Forward = Callable[..., Any]


class TrainingForward(Callback):
    """Base of the callbacks that replace the forward functions of blocks during steps of training.

    Several of them compose: each wraps what the callbacks before it in the list made of a block. Validation, samples
    and checkpoints see the original blocks.

    Attributes:
        order: As of a `RunCallback`.
    """

    order: ClassVar[int]

    def replaced(self, model: Any) -> Iterable[tuple[nn.Module, Forward]]:
        """Some blocks of the language model, each with the function that replaces its `forward`."""
        raise NotImplementedError

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Replace the forward functions."""
        for block, forward in self.replaced(pl_module.model):
            block.forward = forward

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Restore them."""
        _restore(pl_module.model)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Restore them."""
        _restore(pl_module.model)


def _restore(model: Any) -> None:
    for block in model.layers:
        block.__dict__.pop("forward", None)
