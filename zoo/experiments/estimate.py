"""Training steps of runs on random tokens, and an estimate of how long the runs will train on this machine."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from zoo.config.build import from_config, instantiate
from zoo.experiments.definition import Run
from zoo.train.adamw import AdamW
from zoo.train.captured_step import CapturedStep
from zoo.train.metrics import total_loss
from zoo.train.muon import Muon
from zoo.train.optim import build_optimizer, clip, total_norm

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
    steps = [number for run in runs if (number := steps_of(run)) is not None]
    if len(steps) < len(runs):
        return None
    with _threads(max((os.cpu_count() or 1) // jobs, 1)):
        for run in runs:
            step = training_step(run, torch.device("cuda" if gpus else "cpu"))
            for _ in range(2):  # the first one compiles and allocates
                start = time.perf_counter()
                step()
                if gpus:
                    torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
            if time.monotonic() > end:
                break
    mean = sum(seconds) / len(seconds)
    total = sum(number * (seconds[at] if at < len(seconds) else mean) for at, number in enumerate(steps))
    return Estimate(total / min(jobs, max(gpus, 1) if gpus else jobs) / 60, len(seconds))


def steps_of(run: Run) -> int | None:
    """The number of `training_step`s of a run; None if it has no sequences or no number of steps."""
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
    return int(trainer.max_steps * trainer.accumulate_grad_batches)


def training_step(run: Run, device: torch.device) -> Callable[[], None]:
    """A function that trains a run's model on a batch of random tokens, captured if the run is."""
    assert run.parsed is not None
    config, data = run.parsed.clone(), instantiate("data", run.parsed)
    config.model.vocab_size = config.model.vocab_size or getattr(data, "vocab_size", None) or 1024
    model, optim = from_config(config, device), instantiate("optim", config)
    optimizer = build_optimizer(model, optim)
    tokens = torch.randint(config.model.vocab_size, (data.batch_size, data.sequence_length), device=device)
    parameters = [*model.parameters()]

    def compute() -> tuple[Tensor]:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            return (total_loss(model, tokens, tokens) / tokens.numel(),)

    captured = CapturedStep(compute, parameters) if config.cuda_graph and device.type == "cuda" else None
    if captured is not None and isinstance(optimizer, AdamW | Muon):
        optimizer.replay = partial(captured.update, optimizer)

    def step() -> None:
        if captured is not None:
            captured.prepare()
        (compute if captured is None else captured)()[0].backward()
        if optim.gradient_clip is not None and captured is not None:
            captured.clip(optim.gradient_clip, captured.gradient_norm())
        elif optim.gradient_clip is not None:
            trained = [parameter for parameter in parameters if parameter.grad is not None]
            clip(trained, optim.gradient_clip, total_norm(x.grad for x in trained if x.grad is not None))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
