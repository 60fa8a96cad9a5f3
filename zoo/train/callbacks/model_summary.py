"""The size of the model, printed when a run starts."""

import lightning as L
from rich.console import Console
from rich.table import Table

from zoo.lm.size_table import size_table
from zoo.train.callbacks.run_callback import RunCallback


class Summary(RunCallback):
    """Prints the size of the model at the start, one row per layer type."""

    order = 40

    def __init__(self) -> None:
        self._table: Table | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Count the parameters, before a strategy shards them."""
        if stage == "fit":
            self._table = size_table(pl_module.model, getattr(pl_module, "context_length", None) or 1)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero and self._table is not None:
            Console().print(self._table)
