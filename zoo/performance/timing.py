"""Median times of alternating calls, on a GPU by events and on a CPU by the clock."""

import itertools
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from zoo.generation.cuda_graph import capture

TimedCall = Callable[[], Any]
CACHE = 256 << 20  # bytes to overwrite between calls on a GPU: more than any L2 cache
TURN = 10  # calls in a row
_IMPORTED = time.perf_counter()


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Clock:
    """Time marks in a device's stream of work."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Mark the end of the work submitted so far."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def between(self) -> list[float]:
        """Milliseconds between consecutive marks, after waiting for the device; clears the marks."""
        synchronize(self.device)
        marks, self._marks = self._marks, []
        if self.device.type == "cuda":
            return [start.elapsed_time(end) for start, end in itertools.pairwise(marks)]
        return [(end - start) * 1e3 for start, end in itertools.pairwise(marks)]


def medians(
    calls: Mapping[str, TimedCall], device: torch.device, seconds: float = 0.5, least: int = 3, most: int = 100
) -> dict[str, float]:
    """The median time of each call in milliseconds.

    The calls alternate, so that disturbances of the machine affect all of them. Each turn has several calls in a row,
    so that caches and threads are as in a loop of that call alone. Each call first runs twice, to compile and to decide
    how often to repeat it: `least` to `most` times, within `seconds` for all calls.
    """
    clock = Clock(device)
    flush = torch.empty(CACHE, dtype=torch.int8, device=device) if device.type == "cuda" else None
    once = 0.0
    for call in calls.values():
        call()
        clock.mark()
        call()
        clock.mark()
        once += sum(clock.between())
    repeats = max(least, min(most, int(seconds * 1e3 / max(once, 1e-3))))
    order = [name for done in range(0, repeats, TURN) for name in calls for _ in range(min(TURN, repeats - done))]
    for name in order:
        if flush is not None:
            flush.zero_()  # so that inputs come from memory, and launch times are hidden
        clock.mark()
        calls[name]()
        clock.mark()
    times = clock.between()[::2]  # the other intervals are between calls
    timed = list(zip(order, times, strict=True))
    return {name: statistics.median(ms for called, ms in timed if called == name) for name in calls}


def as_graph(call: TimedCall, device: torch.device) -> TimedCall:
    """A call captured as a CUDA graph, which takes the time of its kernels without launching them one by one.

    Raises:
        RuntimeError: The call cannot be captured, for instance because it synchronises.
    """

    def rehearse() -> None:
        for _ in range(2):
            call()

    return capture(rehearse, call, device)


def process_age() -> float:
    """Seconds since this process started, including imports; if the start is unknown, since this module's import."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return time.perf_counter() - _IMPORTED
    return max(age, time.perf_counter() - _IMPORTED)
