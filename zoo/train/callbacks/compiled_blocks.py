"""`compile: true`: torch.compile for the steps of training."""

from collections.abc import Callable, Iterable
from typing import Any

import lightning as L
import torch
from torch import nn

from zoo.train.callbacks.training_forward import Forward, TrainingForward


def compiled_blocks(
    model: nn.Module, backend: str | Callable[..., Any] = "inductor"
) -> list[tuple[nn.Module, Forward]]:
    """Each block of a model with its forward function, which is compiled at the first call."""
    blocks: list[Any] = list(model.layers)  # type: ignore[arg-type]
    # blocks that depend on their depth, such as by a constant decay, are compiled one by one; the default limit is 8
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, 4 * len(blocks))
    # all batches have one shape; a graph for any length would be slower, and cannot split a sequence into chunks
    return [(block, torch.compile(block.forward, dynamic=False, backend=backend)) for block in blocks]


class CompiledBlocks(TrainingForward):
    """Compiles each block of the model separately: blocks of the same mixer share code, which shortens the first step.

    Only steps of training run compiled: validation has other shapes and samples have states, so both would have to be
    compiled again. A checkpoint does not show whether its run was compiled.

    Args:
        backend: The backend of torch.compile.
    """

    order = 80

    def __init__(self, backend: str | Callable[..., Any] = "inductor") -> None:
        self.backend = backend
        self._compiled: list[tuple[nn.Module, Forward]] = []

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Prepare the blocks, which are compiled at the first step."""
        self._compiled = compiled_blocks(pl_module.model, self.backend)

    def replaced(self, model: Any) -> Iterable[tuple[nn.Module, Forward]]:
        """All blocks, compiled."""
        return self._compiled
