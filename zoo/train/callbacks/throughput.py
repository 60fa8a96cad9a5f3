"""The speed of a run, and the memory that it needs."""

import time
from collections import deque
from typing import Any

import lightning as L

from zoo.train.callbacks.run_callback import RunCallback
from zoo.train.devices import peak_flops, peak_memory

TRAINING_FLOPS = 3  # per forward FLOP: the backward pass computes two products for each product of the forward pass


class Throughput(RunCallback):
    """Logs tokens per second, seconds per step, model FLOPs utilisation if the peak is known, and the time left.

    Time spent in validation does not count. FLOPs are those of the model (3 × forward), without recomputation.

    `peak_memory_gib` is the peak memory of the run's first process so far: on a GPU that allocated by PyTorch, on a CPU
    the resident memory of the process (not on Windows).

    Args:
        window: Steps to average over, 1 or more.
    """

    order = 60

    def __init__(self, window: int = 50) -> None:
        self._marks: deque[tuple[float, int, int]] = deque(maxlen=window + 1)  # seconds, tokens, steps
        self._paused = 0.0
        self._pause_start = 0.0
        self._flops_per_token: float | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._marks.clear()
        self._mark(trainer, pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._pause_start = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._paused += time.perf_counter() - self._pause_start

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._marks[-1][2]:
            return
        self._mark(trainer, pl_module)
        if len(self._marks) > 2 and self._marks[0][2] == 0:
            self._marks.popleft()  # the first step is slow: kernels are compiled, memory is allocated
        (start, first_tokens, first_step), (end, tokens, step) = self._marks[0], self._marks[-1]
        seconds = max(end - start, 1e-9)
        tokens_per_second = (tokens - first_tokens) / seconds
        self.log("tokens_per_second", tokens_per_second, prog_bar=True)
        self.log("seconds_per_step", seconds / (step - first_step))
        if trainer.max_steps > 0:
            minutes = (trainer.max_steps - step) * seconds / (step - first_step) / 60
            self.log("minutes_left", minutes, prog_bar=True)
        if peak := peak_flops(pl_module.device):
            if self._flops_per_token is None:
                length = pl_module.context_length or batch.tokens.shape[1]
                self._flops_per_token = TRAINING_FLOPS * pl_module.model.flops(length) / length
            used = self._flops_per_token * tokens_per_second / trainer.world_size
            self.log("mfu", used / peak, prog_bar=True)
        interval = trainer.log_every_n_steps
        if interval and step % interval == 0 and (peak := peak_memory(pl_module.device)) is not None:
            self.log("peak_memory_gib", peak / 2**30)

    def _mark(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._marks.append((time.perf_counter() - self._paused, pl_module.tokens_seen, trainer.global_step))
