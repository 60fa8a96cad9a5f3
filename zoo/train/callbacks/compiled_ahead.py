"""The kernels of the first training step, compiled side by side before it."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from zoo.train.callbacks.compiled_blocks import CompiledBlocks
from zoo.train.callbacks.run_callback import RunCallback
from zoo.train.metrics import total_loss


class CompiledAhead(RunCallback):
    """Compiles the Triton kernels of a training step in threads, where one process trains on one GPU.

    With torch.compile, kernels are compiled with the graphs that they are part of.
    """

    order = 95  # after those that replace the forward functions of blocks

    def __init__(self) -> None:
        self._done = False

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        compiled = any(isinstance(callback, CompiledBlocks) for callback in trainer.callbacks)
        if self._done or compiled or not isinstance(trainer.strategy, SingleDeviceStrategy):
            return
        self._done = True
        model = pl_module.model
        with trainer.precision_plugin.train_step_context():
            compile_ahead(model, lambda: total_loss(model, batch.tokens, batch.labels, batch.cu_seqlens))


def compile_ahead(model: nn.Module, loss: Callable[[], Tensor]) -> None:
    """Compile the Triton kernels of a training step in threads, on a GPU; elsewhere do nothing.

    A kernel is otherwise compiled where it is launched first, one after another. Here a forward and a backward pass of
    `loss`, in which no Triton kernel runs, finds out which ones there are. What it computes is dropped; random numbers
    are drawn as if it had not been there.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters or parameters[0].device.type != "cuda" or find_spec("triton") is None:
        return
    from kernels.gpu.launch import compiling_ahead  # not every platform has Triton

    with torch.random.fork_rng([parameters[0].device]), compiling_ahead():
        torch.autograd.grad(loss(), parameters, allow_unused=True)
