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
    """Each block of a model, and its forward function to be compiled at the first call."""
    blocks: list[Any] = list(model.layers)  # type: ignore[arg-type]
    # what depends on the depth, such as a constant decay, is compiled for each layer; the usual limit is 8
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, 4 * len(blocks))
    # batches have one shape; a graph for any length would be slower, and chunks cannot be cut in it
    return [(block, torch.compile(block.forward, dynamic=False, backend=backend)) for block in blocks]


class CompiledBlocks(TrainingForward):
    """Compiles each block of the model by itself: blocks of a kind share the code, so that the first step comes soon.

    Only steps of training run it. Validation has other shapes, samples have states, and both would be compiled anew; a
    checkpoint does not show how its run was computed.

    Args:
        backend: Of torch.compile.
    """

    order = 80

    def __init__(self, backend: str | Callable[..., Any] = "inductor") -> None:
        self.backend = backend
        self._compiled: list[tuple[nn.Module, Forward]] = []

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Prepare; what is compiled is compiled at the first step."""
        self._compiled = compiled_blocks(pl_module.model, self.backend)

    def replaced(self, model: Any) -> Iterable[tuple[nn.Module, Forward]]:
        """All blocks, compiled."""
        return self._compiled
