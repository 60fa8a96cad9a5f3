"""`activation_checkpointing`: less memory in training, at the price of a second forward pass of some blocks."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from kernels import UserError, recomputing, same_backend
from mixers.context_parallel import exchanged_once
from zoo.train.callbacks.run_callback import Forward, TrainingForward


class CheckpointedBlocks(TrainingForward):
    """Keeps only the inputs of some blocks, and recomputes their activations in the backward pass.

    Only training steps do so, and the gradients are bitwise the same. Compiled blocks are recomputed compiled. The
    run's checkpoints do not depend on it.

    Args:
        every: Recompute every N-th block, starting with the first: 1 for all blocks, 2 for every other block.

    Raises:
        UserError: `every` is below 1.
    """

    order = 90

    def __init__(self, every: int = 1) -> None:
        if every < 1:
            raise UserError(f"activation_checkpointing is {every}; it must be at least 1, for every block, or null.")
        self.every = every

    def replaced(self, model: Any) -> Iterable[tuple[nn.Module, Forward]]:
        """Every N-th block, wrapped in `torch.utils.checkpoint`."""
        return [(block, partial(_checkpointed, block.forward)) for block in list(model.layers)[:: self.every]]


def _checkpointed(forward: Forward, *inputs: Any) -> Any:
    # the random state is restored, so that dropout repeats; `CapturedStep` refuses to capture steps that need it
    restored = not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
    return checkpoint(
        _as_a_whole, forward, *inputs, use_reentrant=False, context_fn=_contexts, preserve_rng_state=restored
    )


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of the forward pass and of its repetition: equal kernels, and no second exchange between processes."""
    (forward, recomputation), (exchange, repetition) = same_backend(), exchanged_once()
    return _Both(forward, exchange), _Both(recomputation, repetition)


class _Both(AbstractContextManager[None]):
    """Two context managers as one, which every backward pass through a checkpoint enters anew."""

    def __init__(self, *contexts: AbstractContextManager[None]) -> None:
        self.contexts = contexts

    def __enter__(self) -> None:
        for context in self.contexts:
            context.__enter__()

    def __exit__(self, *error: Any) -> None:
        for context in reversed(self.contexts):
            context.__exit__(*error)


def _as_a_whole(forward: Forward, *inputs: Any) -> Any:
    """Run a block with the recomputation inside its ops switched off, as the whole block is recomputed."""
    with recomputing(False):
        return forward(*inputs)
