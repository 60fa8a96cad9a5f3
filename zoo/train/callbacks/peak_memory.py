"""How much memory a run needs."""

from typing import Any

import lightning as L

from zoo.train.callbacks.run_callback import RunCallback
from zoo.train.devices import peak_memory


class PeakMemory(RunCallback):
    """Logs `peak_memory_gib`: the most memory that the run has needed so far, of its first process.

    On a GPU that is what PyTorch had allocated there, on a CPU what the process had resident (not on Windows).
    """

    order = 70

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log it."""
        every = trainer.log_every_n_steps
        if every and trainer.global_step % every == 0 and (peak := peak_memory(pl_module.device)) is not None:
            self.log("peak_memory_gib", peak / 2**30)
