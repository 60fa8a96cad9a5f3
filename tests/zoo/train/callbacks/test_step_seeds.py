"""The random numbers of a step depend on the seed, the rank and the step, and on nothing else."""

import itertools
import random
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch

from zoo.train.callbacks.step_seeds import StepSeeds


def drawn(seed: int, rank: int, step: int) -> tuple[float, float, float]:
    """Return the random numbers that Python, NumPy and PyTorch draw in a step."""
    trainer = SimpleNamespace(global_rank=rank, fit_loop=SimpleNamespace(total_batch_idx=step))
    seeds = StepSeeds()
    seeds.load_state_dict({"seed": seed})
    seeds.on_train_batch_start(trainer, None, None, 0)
    return random.random(), np.random.rand(), torch.rand(()).item()


def test_every_seed_rank_and_step_has_numbers_of_its_own():
    places = list(itertools.product(range(3), repeat=3))
    found = [drawn(*place) for place in places]
    torch.rand(7)
    assert found == [drawn(*place) for place in places]
    for numbers in zip(*found, strict=True):
        assert len(set(numbers)) == len(places)


def test_the_seed_is_that_of_the_run(monkeypatch: pytest.MonkeyPatch):
    seeds = StepSeeds()
    L.seed_everything(5, verbose=False)
    seeds.on_fit_start(None, None)
    assert seeds.state_dict() == {"seed": 5}
    L.seed_everything(6, verbose=False)
    seeds.on_fit_start(None, None)  # a resumed run keeps its own
    assert seeds.state_dict() == {"seed": 5}
    monkeypatch.delenv("PL_GLOBAL_SEED")
    torch.manual_seed(7)
    other = StepSeeds()
    other.on_fit_start(None, None)
    assert other.state_dict() == {"seed": 7}
