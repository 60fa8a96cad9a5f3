"""The kernels of the first training step, compiled side by side before it."""

from typing import Any

import lightning as L
from lightning.pytorch.strategies import SingleDeviceStrategy

from zoo.train.callbacks.compiled_blocks import CompiledBlocks
from zoo.train.callbacks.run_callback import RunCallback
from zoo.train.first_step import compile_ahead
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
        """Compile for the first batch."""
        compiled = any(isinstance(callback, CompiledBlocks) for callback in trainer.callbacks)
        if self._done or compiled or not isinstance(trainer.strategy, SingleDeviceStrategy):
            return
        self._done = True
        model = pl_module.model
        with trainer.precision_plugin.train_step_context():
            compile_ahead(model, lambda: total_loss(model, batch.tokens, batch.labels, batch.cu_seqlens))
