"""`sweep --jobs=auto`: how many runs share a GPU best, from training steps of several at a time."""

import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch

from zoo.experiments.definition import Run
from zoo.experiments.estimate import learner_of, steps_of

CANDIDATES = (1, 2, 4, 8)  # runs on a GPU
SECONDS = 2.0  # to time each candidate
PATIENCE = 300.0  # seconds for a process to be ready
MEMORY = 0.7  # part of a GPU's memory that steps may take, since validation and checkpoints take more
LEAST_GAIN = 0.97  # of the time with fewer runs, for more of them to be chosen


class Trial(NamedTuple):
    """Steps that were timed.

    Attributes:
        ready: Seconds from the start of a process until its second step.
        speeds: Runs at a time → steps per second of all of them.
    """

    ready: float
    speeds: dict[int, float]


def best_jobs(runs: Sequence[Run]) -> tuple[int, str]:
    """The number of runs at a time for the shortest sweep on this machine, and a line that says why."""
    gpus, cores = torch.cuda.device_count(), os.cpu_count() or 1
    if not gpus:
        jobs = max(min(cores, len(runs)), 1)
        return jobs, f"jobs: {jobs} at a time, one for each CPU core"
    counts = [steps_of(run) for run in runs]
    if not counts or None in counts:
        return gpus, "jobs: one for each GPU, since not all runs have sequences and a number of steps"
    try:
        trial = measure(runs, torch.device("cuda"), [n for n in CANDIDATES if n <= cores // gpus])
    except RuntimeError as error:
        return gpus, f"jobs: one for each GPU, since a timed step failed: {error}"
    return chosen(trial, len(runs), sum(map(int, filter(None, counts))) / len(counts), gpus)


def chosen(trial: Trial, runs: int, steps: float, gpus: int) -> tuple[int, str]:
    """The number of runs at a time for the shortest sweep, and a line that says why.

    Args:
        trial: What was timed.
        runs: Number of runs.
        steps: Steps of a run.
        gpus: Number of GPUs.
    """
    best, least = 1, math.inf
    for number, speed in sorted(trial.speeds.items()):
        seconds = math.ceil(runs / (number * gpus)) * (trial.ready + steps * number / speed)
        if seconds < LEAST_GAIN * least:
            best, least = number, seconds
    speeds = ", ".join(f"{speed:.3g} with {number}" for number, speed in sorted(trial.speeds.items()))
    many = "1 run" if best == 1 else f"{best} runs"
    line = f"jobs: {many} at a time on each GPU, about {max(least / 60, 1):.0f} min in all (steps/s measured: {speeds})"
    return best * gpus, line


def measure(runs: Sequence[Run], device: torch.device, candidates: Sequence[int]) -> Trial:
    """Time the steps of the first runs in processes that share a device.

    Raises:
        RuntimeError: The first run cannot be timed.
    """
    workers = [_Worker(runs[0], device)]
    try:
        ready, memory = workers[0].ready()
        fitting = len(runs) if not memory else int(MEMORY / memory)
        workers += [_Worker(run, device) for run in runs[1 : min(max(candidates, default=1), fitting)]]
        usable = workers[:1]
        for worker in workers[1:]:
            try:
                ready = worker.ready()[0]
            except RuntimeError:
                continue  # it needs more memory than the first, for instance
            usable.append(worker)
        numbers = [number for number in candidates if number <= len(usable)] or [1]
        return Trial(ready, {number: _speed(usable[:number]) for number in numbers})
    finally:
        for worker in workers:
            worker.stop()


def _speed(workers: Sequence["_Worker"]) -> float:
    for worker in workers:
        worker.connection.send(SECONDS)
    return sum(worker.receive() for worker in workers)


class _Worker:
    """A process that trains one run."""

    def __init__(self, run: Run, device: torch.device):
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._start = time.perf_counter()
        self._process = context.Process(target=_serve, args=(run.sources, device, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def ready(self) -> tuple[float, float]:
        """Wait for the second step; return the seconds since the start, and the part of the GPU's memory in use."""
        memory = self.receive()
        return time.perf_counter() - self._start, memory

    def receive(self) -> Any:
        """Receive the next number that the process sends.

        Raises:
            RuntimeError: It has failed, or takes too long.
        """
        try:
            if not self.connection.poll(PATIENCE):
                raise RuntimeError(f"it takes more than {PATIENCE:.0f} s")
            answer = self.connection.recv()
        except (EOFError, OSError):
            raise RuntimeError("its process has ended") from None
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer

    def stop(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.join()
        self.connection.close()


def _serve(sources: tuple[str, ...], device: torch.device, parent: Any) -> None:
    """Send the memory that a run's steps take, then for each number of seconds the steps per second in them."""
    try:
        run = Run("trial", sources)
        step = learner_of(run._replace(parsed=run.read()), device).step
        for _ in range(2):
            step()
        parent.send(_memory(device))
        while True:
            parent.send(_steps_per_second(step, device, parent.recv()))
    except EOFError:
        return
    except Exception as error:  # of any type, to be reported by the other process
        parent.send(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")


def _steps_per_second(step: Callable[[], None], device: torch.device, seconds: float) -> float:
    """Run steps for some seconds, two at a time in the queue of a GPU."""
    queued: deque[torch.cuda.Event] = deque()
    count, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < seconds or not count:
        step()
        count += 1
        if device.type == "cuda":
            queued.append(torch.cuda.current_stream(device).record_event())
            if len(queued) > 1:
                queued.popleft().synchronize()
    return count / passed


def _memory(device: torch.device) -> float:
    """The part of a GPU's memory that this process has reserved; 0 on a CPU."""
    if device.type != "cuda":
        return 0.0
    return torch.cuda.max_memory_reserved(device) / torch.cuda.mem_get_info(device)[1]
