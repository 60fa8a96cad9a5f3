"""The memory that a run needs."""

from typing import Any

import lightning as L

from zoo.train.callbacks.run_callback import RunCallback
from zoo.train.devices import peak_memory


class PeakMemory(RunCallback):
    """Logs `peak_memory_gib`: the peak memory of the run's first process so far.

    On a GPU that is the memory allocated by PyTorch, on a CPU the resident memory of the process (not on Windows).
    """

    order = 70

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        interval = trainer.log_every_n_steps
        if interval and trainer.global_step % interval == 0 and (peak := peak_memory(pl_module.device)) is not None:
            self.log("peak_memory_gib", peak / 2**30)
