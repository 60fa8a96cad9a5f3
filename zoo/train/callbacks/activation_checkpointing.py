"""`activation_checkpointing`: less memory for the steps of training, for one more forward pass of some blocks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.checkpoint import checkpoint

from kernels import UserError, recomputing, same_backend


class CheckpointedBlocks(Callback):
    """Keeps of some blocks only their inputs, and computes them once more in the backward pass.

    Only steps of training do so; the gradients are the same to the last bit. A checkpoint of the run does not show it.

    Args:
        every: Of so many blocks, the first one is computed again: 1 for all of them, 2 for every other one.

    Raises:
        UserError: `every` is below 1.
    """

    def __init__(self, every: int = 1) -> None:
        if every < 1:
            raise UserError(f"activation_checkpointing is {every}; it must be at least 1, for every block, or null.")
        self.every = every
        self._blocks: list[nn.Module] = []

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Let the blocks run so; those that are compiled, compiled."""
        self._blocks = list(pl_module.model.layers)[:: self.every]
        for block in self._blocks:
            block.forward = partial(_again, block.forward)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Let them run as they are written."""
        self._restore()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """The same."""
        self._restore()

    def _restore(self) -> None:
        for block in self._blocks:
            block.__dict__.pop("forward", None)
        self._blocks = []


def _again(forward: Callable[..., Any], *inputs: Any) -> Any:
    # the random numbers, too, are the same again
    return checkpoint(_as_a_whole, forward, *inputs, use_reentrant=False, context_fn=same_backend)


def _as_a_whole(forward: Callable[..., Any], *inputs: Any) -> Any:
    """Run a block, both times, without a note of what is computed again in any case."""
    with recomputing(False):
        return forward(*inputs)
