"""Estimate of how long runs will train on this machine, from training steps on random tokens."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from zoo.config.build import captures_steps, from_config, instantiate
from zoo.experiments.definition import Run
from zoo.train.learner import Learner
from zoo.train.metrics import total_loss

BUDGET_SECONDS = 20.0


class Estimate(NamedTuple):
    """Training time of several runs.

    Attributes:
        minutes: Training steps of all runs, without start-up and validation.
        timed: Number of runs of which a step was timed; the others count as their mean.
    """

    minutes: float
    timed: int


def estimate(runs: Sequence[Run], jobs: int) -> Estimate | None:
    """Time a step of runs until a time budget is used up; None if a run has no sequences or no number of steps.

    Args:
        runs: Runs with their parsed configs.
        jobs: Number of runs at a time, which share the CPU cores or GPUs.
    """
    gpus = torch.cuda.device_count()
    seconds, end = list[float](), time.monotonic() + BUDGET_SECONDS
    steps = [number for run in runs if (number := _steps(run)) is not None]
    if len(steps) < len(runs):
        return None
    with _threads(max((os.cpu_count() or 1) // jobs, 1)):
        for run in runs:
            learner = _learner(run, torch.device("cuda" if gpus else "cpu"))
            for _ in range(2):  # the first one compiles and allocates
                start = time.perf_counter()
                learner.step()
                if gpus:
                    torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
            if time.monotonic() > end:
                break
    mean = sum(seconds) / len(seconds)
    total = sum(number * (seconds[at] if at < len(seconds) else mean) for at, number in enumerate(steps))
    return Estimate(total / min(jobs, max(gpus, 1) if gpus else jobs) / 60, len(seconds))


def _steps(run: Run) -> int | None:
    """The number of a run's micro-batches; None if it has no sequences or no number of steps."""
    assert run.parsed is not None
    trainer, model = run.parsed.trainer, run.parsed.model
    data = instantiate("data", run.parsed)
    of_tokens = model.inputs is None and model.head is None
    if (
        trainer.max_steps < 1
        or not of_tokens
        or not hasattr(data, "sequence_length")
        or not hasattr(data, "batch_size")
    ):
        return None
    parts = trainer.accumulate_grad_batches * data.batch_size / (run.parsed.rows_per_device or data.batch_size)
    return int(trainer.max_steps * max(parts, 1))


def _learner(run: Run, device: torch.device) -> Learner:
    """A learner of a run's model on a batch of random tokens, captured if the run is."""
    assert run.parsed is not None
    config, data = run.parsed.clone(), instantiate("data", run.parsed)
    config.model.vocab_size = config.model.vocab_size or getattr(data, "vocab_size", None) or 1024
    model, on_gpu = from_config(config, device), device.type == "cuda"
    rows = min(config.rows_per_device or data.batch_size, data.batch_size)
    tokens = torch.randint(config.model.vocab_size, (rows, data.sequence_length), device=device)

    def loss() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            return total_loss(model, tokens, tokens) / tokens.numel()

    return Learner(model, instantiate("optim", config), loss, cuda_graph=on_gpu and captures_steps(config))


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
