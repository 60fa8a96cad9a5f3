"""What goes on around the training steps: reproducible random numbers, speed, and samples of text."""

import os
import random
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback

from kernels.errors import UserError
from zoo.generate import generate

# Dense bf16 FLOP/s of the tensor cores, from the makers' data sheets; the first name found in the device's name counts.
PEAK_FLOPS = {
    "B200": 2.25e15,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "4090": 165e12,
    "3090": 71e12,
}
TRAINING_FLOPS = 3  # per forward FLOP: the backward pass computes two products for each one of the forward pass


class StepSeeds(Callback):
    """Makes the random numbers of each training step a function of the seed, the process and the step alone.

    So dropout is the same in a continued run as in an uninterrupted one, whatever validation, sampling or data loading
    draw in between, and wherever the run was stopped; saving the generators' states would not give the first.
    """

    def __init__(self) -> None:
        self.seed: int | None = None

    def state_dict(self) -> dict[str, Any]:
        """The seed, which a continued run keeps."""
        return {"seed": self.seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the seed of the run that is continued."""
        self.seed = state_dict["seed"]

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take the seed that `seed_everything` was given, else PyTorch's."""
        if self.seed is None:
            self.seed = int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed()))

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Seed Python, NumPy and PyTorch, on all devices."""
        numbers = (self.seed or 0, trainer.global_rank, trainer.fit_loop.total_batch_idx)
        seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)


class Validations(Callback):
    """Leaves no validation out: one more when a run ends between two, and first of all what a stopped run left out."""

    def __init__(self) -> None:
        self._step = -1  # of the last one
        self._batch = 0  # after which it was, counted over all epochs

    def state_dict(self) -> dict[str, Any]:
        """After which batch the last one was."""
        return {"batch": self._batch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Know which one may be missing."""
        self._batch = state_dict["batch"]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Make up for one that was due when the run was stopped; its loss may be the best."""
        loop = trainer.fit_loop.epoch_loop
        batches, every = loop.batch_progress, trainer.val_check_batch
        by_epoch = trainer.check_val_every_n_epoch is not None
        read = batches.current.ready if by_epoch else batches.total.ready
        due = bool(read and every) and read % every == 0 and loop._should_check_val_epoch()
        if due and self._batch != batches.total.ready:
            loop.val_loop.restarting = False
            self._run(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remember when."""
        if not trainer.sanity_checking:
            self._step, self._batch = trainer.global_step, trainer.fit_loop.epoch_loop.batch_progress.total.ready

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Run Lightning's own validation loop, as it does between steps."""
        stopped = trainer.interrupted or trainer.received_sigterm
        if self._step != trainer.global_step and not trainer.fast_dev_run and not stopped:
            loop = trainer.fit_loop.epoch_loop
            loop._batches_that_stepped -= 1  # its row of metrics is that of the last step, as in a run's other ones
            self._run(trainer)
            loop._batches_that_stepped += 1

    def _run(self, trainer: L.Trainer) -> None:
        loop = trainer.fit_loop.epoch_loop.val_loop
        if not loop.skip:
            trainer.validating = True
            loop.run()
            trainer.training = True


class Throughput(Callback):
    """Logs tokens per second, seconds per step, model FLOPs utilisation where the peak is known, and the time left.

    Time in validation does not count. FLOPs are those of the model (3 × forward), not of recomputation.

    Args:
        window: Steps to average over.
    """

    def __init__(self, window: int = 50) -> None:
        if window < 1:
            raise UserError(f"Throughput.window is {window}, but must be 1 or more steps.")
        self.tokens_per_second: float | None = None
        self._marks: deque[tuple[float, int, int]] = deque(maxlen=window + 1)  # seconds, tokens, steps
        self._paused = 0.0
        self._pause_start = 0.0
        self._flops_per_token: float | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        self._marks.clear()
        self._mark(trainer, pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the clock."""
        self._pause_start = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let the clock go on."""
        self._paused += time.perf_counter() - self._pause_start

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the means of the window."""
        if trainer.global_step == self._marks[-1][2]:
            return
        self._mark(trainer, pl_module)
        if len(self._marks) > 2 and self._marks[0][2] == 0:
            self._marks.popleft()  # the first step is slow: kernels are compiled, memory is allocated
        (start, first_tokens, first_step), (end, tokens, step) = self._marks[0], self._marks[-1]
        seconds = max(end - start, 1e-9)
        self.tokens_per_second = (tokens - first_tokens) / seconds
        self.log("tokens_per_second", self.tokens_per_second, prog_bar=True)
        self.log("seconds_per_step", seconds / (step - first_step))
        if trainer.max_steps > 0:
            minutes = (trainer.max_steps - step) * seconds / (step - first_step) / 60
            self.log("minutes_left", minutes, prog_bar=True)
        if peak := peak_flops(pl_module.device):
            if self._flops_per_token is None:
                length = pl_module.context_length or batch.tokens.shape[1]
                self._flops_per_token = TRAINING_FLOPS * pl_module.model.flops(length) / length
            used = self._flops_per_token * self.tokens_per_second / trainer.world_size
            self.log("mfu", used / peak, prog_bar=True)

    def _mark(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._marks.append((time.perf_counter() - self._paused, pl_module.tokens_seen, trainer.global_step))


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 peak of a device in FLOP/s; None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for model, flops in PEAK_FLOPS.items() if model in name), None)


class PeakMemory(Callback):
    """Logs `peak_memory_gib`: the most memory that the run has needed so far, of its first process.

    On a GPU that is what PyTorch had allocated there, on a CPU what the process had resident (not on Windows).
    """

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log it."""
        every = trainer.log_every_n_steps
        if every and trainer.global_step % every == 0 and (peak := peak_memory(pl_module.device)) is not None:
            self.log("peak_memory_gib", peak / 2**30)


def peak_memory(device: torch.device) -> int | None:
    """Most bytes that this process has had on a device at a time; None where nobody counts them."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type != "cpu" or sys.platform == "win32":
        return None
    import resource  # not there on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


class Samples(Callback):
    """Lets the model write at each validation, to the terminal and to `samples.txt` in the run's folder.

    Args:
        prompts: What it continues; an empty prompt starts a document.
        max_new_tokens: How far.
        temperature: 0 takes the likeliest token.
        top_p: Draw from the likeliest tokens that together have this probability; null draws from all.
        seed: Of the draws, so that samples of different steps differ by the model alone.
    """

    def __init__(
        self,
        prompts: Sequence[str] = ("",),
        max_new_tokens: int = 64,
        temperature: float = 0.8,
        top_p: float | None = 0.95,
        seed: int = 0,
    ) -> None:
        self.prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.top_p = top_p
        self.seed = seed

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write a sample for each prompt."""
        if trainer.state.fn != "fit" or trainer.sanity_checking or pl_module.tokenizer is None:
            return
        for prompt in self.prompts:
            with trainer.precision_plugin.forward_context():
                pieces = generate(
                    pl_module.model,
                    pl_module.tokenizer,
                    prompt,
                    max_new_tokens=self.max_new_tokens,
                    temperature=self.temperature,
                    top_p=self.top_p,
                    seed=self.seed,
                )
                text = f"── sample after {trainer.global_step} steps ──\n{prompt}{''.join(pieces)}\n"
            if trainer.is_global_zero:  # all processes generate, since a sharded model needs all of them
                trainer.print(text)
                with open(Path(trainer.default_root_dir) / "samples.txt", "a", encoding="utf-8") as file:
                    file.write(text + "\n")
