"""Medians of calls that take turns, on a GPU by events and on a processor by the clock."""

import itertools
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from zoo.generation.decoder import capture

Call = Callable[[], object]
CACHE = 256 << 20  # bytes to overwrite between calls on a GPU: more than any second-level cache
TURN = 10  # calls
_IMPORTED = time.perf_counter()


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Clock:
    """Marks in the stream of work of a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Note when the work given so far is done."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def between(self) -> list[float]:
        """Milliseconds between the marks, after waiting for the device; forgets them."""
        synchronize(self.device)
        marks, self._marks = self._marks, []
        if self.device.type == "cuda":
            return [start.elapsed_time(end) for start, end in itertools.pairwise(marks)]
        return [(end - start) * 1e3 for start, end in itertools.pairwise(marks)]


def medians(
    calls: Mapping[str, Call], device: torch.device, seconds: float = 0.5, least: int = 3, most: int = 100
) -> dict[str, float]:
    """Median milliseconds of each call.

    The calls take turns, so that what happens to the machine meanwhile happens to all of them. A turn is several calls,
    so that each finds caches and threads of the processor as its own kind leaves them, as in a loop that calls nothing
    else. Each runs twice before: the first time compiles, the second says how often to repeat.

    Args:
        calls: By name.
        device: Where they run.
        seconds: Time to spend on all of them together.
        least: Repetitions at least, and
        most: at most.
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
            flush.zero_()  # inputs come from memory, and launches hide behind it
        clock.mark()
        calls[name]()
        clock.mark()
    times = clock.between()[::2]  # the others lie between the calls
    found = list(zip(order, times, strict=True))
    return {name: statistics.median(ms for which, ms in found if which == name) for name in calls}


def as_graph(call: Call, device: torch.device) -> Call:
    """A call on a GPU recorded as a CUDA graph: what its kernels take, without the time to launch them.

    Raises:
        RuntimeError: The call cannot be recorded; it waits for the device, say.
    """

    def rehearse() -> None:
        for _ in range(2):
            call()

    def step() -> Any:
        return call()

    return capture(rehearse, step, device)


def process_age() -> float:
    """Seconds since this process started, imports included; where the system does not say, since this import."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return time.perf_counter() - _IMPORTED
    return max(age, time.perf_counter() - _IMPORTED)
