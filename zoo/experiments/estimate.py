"""An estimate of how long runs will train on this machine, from timed training steps."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from zoo.config.build import from_config
from zoo.experiments.definition import Run

BUDGET_SECONDS = 20.0


class Estimate(NamedTuple):
    """Training time of several runs.

    Attributes:
        minutes: Forward and backward passes of all runs, without start-up and validation.
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
    steps = []
    for run in runs:
        trainer, data = run.parsed.trainer, run.parsed.data.init_args  # type: ignore[union-attr]
        if trainer.max_steps < 1 or "sequence_length" not in data or "batch_size" not in data:
            return None
        steps.append(trainer.max_steps * trainer.accumulate_grad_batches)
    with _threads(max((os.cpu_count() or 1) // jobs, 1)):
        for run in runs:
            seconds.append(_seconds_of_a_step(run, "cuda" if gpus else "cpu"))
            if time.monotonic() > end:
                break
    mean = sum(seconds) / len(seconds)
    total = sum(number * (seconds[at] if at < len(seconds) else mean) for at, number in enumerate(steps))
    return Estimate(total / min(jobs, max(gpus, 1) if gpus else jobs) / 60, len(seconds))


def _seconds_of_a_step(run: Run, device: str) -> float:
    """Time the second forward and backward pass of a run's model over one batch of random tokens."""
    config = run.parsed.clone()  # type: ignore[union-attr]
    config.model.vocab_size = config.model.vocab_size or config.data.init_args.get("vocab_size") or 1024
    model = from_config(config, device)
    shape = (config.data.init_args.batch_size, config.data.init_args.sequence_length)
    tokens = torch.randint(config.model.vocab_size, shape, device=device)
    for _ in range(2):  # the first one compiles and allocates
        start = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            model.loss(tokens, tokens).backward()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    return seconds


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
