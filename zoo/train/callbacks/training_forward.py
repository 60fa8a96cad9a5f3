"""The base class of callbacks that replace the forward functions of blocks during training steps."""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import lightning as L
from lightning.pytorch.callbacks import Callback
from torch import nn

Forward = Callable[..., Any]


class TrainingForward(Callback):
    """Replaces the forward functions of blocks during training steps, and only then.

    Several of them compose: each wraps the forward functions that the callbacks before it installed. Validation,
    sampling and checkpoints see the original blocks.

    Attributes:
        order: As in `RunCallback`.
    """

    order: ClassVar[int]

    def replaced(self, model: Any) -> Iterable[tuple[nn.Module, Forward]]:
        """Blocks of the language model, each with the function that replaces its `forward`."""
        raise NotImplementedError

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        for block, forward in self.replaced(pl_module.model):
            block.forward = forward

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        for block in pl_module.model.layers:
            block.__dict__.pop("forward", None)

    on_exception = on_train_batch_end
