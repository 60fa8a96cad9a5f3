"""`activation_checkpointing`: less memory for the steps of training, for one more forward pass of some blocks."""

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from kernels import UserError, recomputing, same_backend
from zoo.train.callbacks.training_forward import Forward, TrainingForward


class CheckpointedBlocks(TrainingForward):
    """Keeps only the inputs of some blocks, and recomputes the rest in the backward pass.

    Only steps of training do so; the gradients are the same to the last bit. Blocks that are compiled are recomputed
    compiled. A checkpoint of the run does not show it.

    Args:
        every: Recompute every N-th block, from the first one on: 1 for all of them, 2 for every other one.

    Raises:
        UserError: `every` is below 1.
    """

    order = 90

    def __init__(self, every: int = 1) -> None:
        if every < 1:
            raise UserError(f"activation_checkpointing is {every}; it must be at least 1, for every block, or null.")
        self.every = every

    def replaced(self, model: Any) -> Iterable[tuple[nn.Module, Forward]]:
        """Every N-th block, with a checkpoint around it."""
        return [(block, partial(_checkpointed, block.forward)) for block in list(model.layers)[:: self.every]]


def _checkpointed(forward: Forward, *inputs: Any) -> Any:
    # the random numbers are the same again, too
    return checkpoint(_as_a_whole, forward, *inputs, use_reentrant=False, context_fn=same_backend)


def _as_a_whole(forward: Forward, *inputs: Any) -> Any:
    """Run a block, the first time and again, without notes of what inside it could be recomputed by itself."""
    with recomputing(False):
        return forward(*inputs)
