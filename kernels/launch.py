"""How the Triton kernels are launched: block sizes, warps and stages, by architecture, head size and dtype.

A table and no autotuning: the first call costs one compilation, and nothing ever depends on the length. Every entry was
compiled ahead of time without large spills, and is tested on a device in outputs *and* gradients. Some that look
harmless are not: on Hopper with Triton 3.6, (32, 4, 1) is silently wrong, and (32, 8, 1) an illegal access.
Entries of a file go before these (`launch_file.py`).
"""

import logging
from functools import cache
from typing import NamedTuple

import torch

from . import launch_file

log = logging.getLogger(__name__)

HOPPER, OTHER = 9, 0


class Launch(NamedTuple):
    """One entry."""

    block: int  # width of the slice of a state, or of the key channels, that one program holds
    warps: int
    stages: int


# kernel → (compute capability, largest head size that the entry serves, bytes per element)
TABLE: dict[str, dict[tuple[int, int, int], Launch]] = {
    "carry": {
        (HOPPER, 128, 2): Launch(64, 4, 2),
        (HOPPER, 256, 2): Launch(32, 4, 2),
        (HOPPER, 64, 4): Launch(16, 4, 2),
        (OTHER, 64, 2): Launch(32, 4, 2),
        (OTHER, 32, 4): Launch(16, 4, 2),
    },
    "local": {  # the pass without an output
        (HOPPER, 128, 2): Launch(128, 4, 3),
        (HOPPER, 256, 2): Launch(32, 4, 2),
        (HOPPER, 64, 4): Launch(16, 4, 2),
        (OTHER, 64, 2): Launch(32, 4, 2),
        (OTHER, 32, 4): Launch(16, 4, 2),
    },
    "head_scores": {
        (HOPPER, 256, 2): Launch(256, 4, 2),
        (HOPPER, 64, 4): Launch(64, 4, 2),
        (OTHER, 64, 2): Launch(64, 4, 2),
        (OTHER, 32, 4): Launch(32, 4, 2),
    },
    "channel_scores": {
        (HOPPER, 256, 2): Launch(32, 4, 2),
        (HOPPER, 64, 4): Launch(32, 4, 2),
        (OTHER, 64, 2): Launch(16, 4, 2),
        (OTHER, 32, 4): Launch(16, 4, 2),
    },
    "channel_grads": {
        (HOPPER, 256, 2): Launch(32, 4, 2),
        (HOPPER, 64, 4): Launch(16, 4, 2),
        (OTHER, 64, 2): Launch(16, 4, 2),
        (OTHER, 32, 4): Launch(16, 4, 2),
    },
    "step": {
        (HOPPER, 1 << 30, 2): Launch(64, 4, 2),
        (HOPPER, 1 << 30, 4): Launch(64, 4, 2),
        (OTHER, 1 << 30, 2): Launch(32, 4, 2),
        (OTHER, 1 << 30, 4): Launch(32, 4, 2),
    },
}


def launch(kernel: str, size: int, dtype: torch.dtype, device: torch.device) -> Launch:
    """The entry for a head size (the larger of K and V)."""
    file, gpu = launch_file.current(), launch_file.version(device)
    return _entry(kernel, size, dtype.itemsize, capability(device), file, gpu)


def largest(dtype: torch.dtype, device: torch.device) -> int:
    """The largest head that one program of every kernel can hold; longer ones are cut into several."""
    return _largest(dtype.itemsize, capability(device), launch_file.current(), launch_file.version(device))


# as in `backend.py`: the compiler need not look into files
largest._dynamo_marked_constant = True  # type: ignore[attr-defined]


def entries(
    kernel: str, itemsize: int, architecture: int, file: str | None, gpu: tuple[int, int] | None
) -> dict[int, Launch]:
    """The entries of a kernel by the largest head that they serve, those of a file before the built-in ones."""
    known = {key[1]: entry for key, entry in TABLE[kernel].items() if (key[0], key[2]) == (architecture, itemsize)}
    given = launch_file.given(file, f"linear_recurrence.{kernel}", itemsize, gpu)
    return {**known, **{size: Launch(**entry) for size, entry in given.items()}}


@cache
def _largest(itemsize: int, architecture: int, file: str | None, gpu: tuple[int, int] | None) -> int:
    return min(max(entries(kernel, itemsize, architecture, file, gpu)) for kernel in TABLE)


@cache
def _entry(
    kernel: str, size: int, itemsize: int, architecture: int, file: str | None, gpu: tuple[int, int] | None
) -> Launch:
    known = entries(kernel, itemsize, architecture, file, gpu)
    return known[min(served for served in known if served >= size)]


@cache
def capability(device: torch.device) -> int:
    """The architecture that the tables know, or OTHER."""
    if device.type != "cuda":  # the interpreter runs what is tested on the device
        return HOPPER
    major, minor = torch.cuda.get_device_capability(device)
    if major == HOPPER:
        return HOPPER
    log.warning("launch: no entries for compute capability %d.%d, using cautious ones", major, minor)
    return OTHER


@cache
def multiprocessors(device: torch.device) -> int:
    """How many programs can run side by side."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
