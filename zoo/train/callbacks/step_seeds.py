"""Random numbers that do not depend on where a run was stopped."""

import os
import random
from typing import Any

import lightning as L
import numpy as np
import torch

from kernels import is_deterministic
from zoo.train.callbacks.run_callback import RunCallback


class StepSeeds(RunCallback):
    """Makes the random numbers of each training step a function of the seed, the rank and the step alone.

    In deterministic mode they are a function of the seed and the number of the micro-batch, in one process or several.

    So dropout is the same in a resumed run as in an uninterrupted one, however many random numbers validation, sampling
    or data loading draw in between, and wherever the run was stopped. Saved generator states would not achieve that.
    """

    order = 50

    def __init__(self) -> None:
        self.seed: int | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seed = state_dict["seed"]

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take the seed of `seed_everything`, or else PyTorch's."""
        if self.seed is None:
            self.seed = int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed()))

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Seed Python, NumPy and PyTorch, on all devices."""
        numbers = (self.seed or 0, trainer.global_rank, trainer.fit_loop.total_batch_idx)
        if is_deterministic():
            numbers = (self.seed or 0, 0, numbers[2] * trainer.world_size + numbers[1])
        seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)
        # `torch.manual_seed` also notes the stack for each kind of device that is not there, at every call
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)
        elif torch.accelerator.is_available():
            torch.manual_seed(seed)
