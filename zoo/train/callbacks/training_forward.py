"""Blocks that run otherwise than they are written while a step of training is taken, and only then."""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import lightning as L
from lightning.pytorch.callbacks import Callback
from torch import nn

Forward = Callable[..., Any]


class TrainingForward(Callback):
    """Base of the callbacks that replace the forward functions of blocks for the steps of training.

    Several of them add up: each is given what those before it in the list of callbacks made of a block. Validation,
    samples and checkpoints see the blocks as they are written.

    Attributes:
        order: As of a `RunCallback`.
    """

    order: ClassVar[int]

    def replaced(self, model: Any) -> Iterable[tuple[nn.Module, Forward]]:
        """Blocks of the language model, each with the function that is to run instead of its `forward`."""
        raise NotImplementedError

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Replace them."""
        for block, forward in self.replaced(pl_module.model):
            block.forward = forward

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Let the blocks run as they are written."""
        _restore(pl_module.model)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """The same."""
        _restore(pl_module.model)


def _restore(model: Any) -> None:
    for block in model.layers:
        block.__dict__.pop("forward", None)
