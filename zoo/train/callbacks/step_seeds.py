"""Random numbers that a continued run repeats."""

import os
import random
from typing import Any

import lightning as L
import numpy as np
import torch

from zoo.train.callbacks.run_callback import RunCallback


class StepSeeds(RunCallback):
    """Makes the random numbers of each training step a function of the seed, the process and the step alone.

    So dropout is the same in a continued run as in an uninterrupted one, whatever validation, sampling or data loading
    draw in between, and wherever the run was stopped; saving the generators' states would not give the first.
    """

    order = 50

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
