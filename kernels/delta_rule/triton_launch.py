"""Block sizes, warps and stages of the kernels, by architecture, head size and dtype; never by length.

Every entry is tested on the device it names, outputs and gradients: some that are missing here compile and compute
nonsense (H200, triton 3.6: 32 values, 4 warps, 1 stage; 16 values, 3 stages). Entries of a file go before these
(`launch_file.py`).
"""

from functools import cache
from typing import NamedTuple

import torch

from .. import launch_file
from ..launch import HOPPER, OTHER, capability, multiprocessors


class Launch(NamedTuple):
    """How a kernel is launched; the blocks are where it cuts the axis of keys or of values."""

    keys: int
    values: int
    warps: int
    stages: int


class Launches(NamedTuple):
    """Of all kernels. `narrow` replaces `forward` and `backward` where these would leave most of the device idle."""

    prepare: Launch
    forward: Launch
    backward: Launch
    dq: Launch
    dk: Launch
    narrow: Launch | None = None


# (compute capability, largest head size it serves, bytes per element)
TABLE: dict[tuple[int, int, int], Launches] = {
    (HOPPER, 64, 2): Launches(
        prepare=Launch(64, 0, 4, 2),
        forward=Launch(0, 64, 4, 3),
        backward=Launch(0, 64, 4, 3),
        dq=Launch(64, 64, 4, 2),
        dk=Launch(64, 64, 4, 2),
        narrow=Launch(0, 32, 4, 3),
    ),
    (HOPPER, 128, 2): Launches(
        prepare=Launch(128, 0, 4, 2),
        forward=Launch(0, 64, 4, 3),
        backward=Launch(0, 64, 4, 3),
        dq=Launch(128, 64, 4, 2),
        dk=Launch(64, 32, 4, 3),
        narrow=Launch(0, 32, 4, 3),
    ),
    (HOPPER, 256, 2): Launches(
        prepare=Launch(128, 0, 4, 2),
        forward=Launch(0, 32, 4, 2),
        backward=Launch(0, 64, 4, 2),
        dq=Launch(128, 64, 4, 2),
        dk=Launch(64, 64, 4, 2),
    ),
    (HOPPER, 64, 4): Launches(
        prepare=Launch(64, 0, 4, 2),
        forward=Launch(0, 32, 4, 2),
        backward=Launch(0, 32, 4, 2),
        dq=Launch(64, 32, 4, 2),
        dk=Launch(32, 32, 4, 2),
    ),
    (HOPPER, 128, 4): Launches(
        prepare=Launch(64, 0, 4, 2),
        forward=Launch(0, 16, 4, 2),
        backward=Launch(0, 16, 4, 2),
        dq=Launch(64, 32, 4, 2),
        dk=Launch(32, 32, 4, 2),
    ),
    (HOPPER, 256, 4): Launches(
        prepare=Launch(64, 0, 4, 2),
        forward=Launch(0, 16, 4, 1),
        backward=Launch(0, 16, 4, 1),
        dq=Launch(64, 32, 4, 2),
        dk=Launch(32, 32, 4, 2),
    ),
}
FEWEST_CHUNKS, FEWEST_SEGMENTS = 16, 6


def launches(device: torch.device, K: int, V: int, dtype: torch.dtype) -> Launches:
    """The launches for keys of size K and values of size V."""
    size = int(max(K, V))  # a compiler may not know it yet
    return _entry(device, size, dtype.itemsize, launch_file.current())


@cache
def _entry(device: torch.device, size: int, itemsize: int, file: str | None) -> Launches:
    architecture = capability(device)
    if architecture == OTHER:
        # blocks as small as they come: right before fast
        small, narrow = Launch(32, 32, 4, 2), Launch(32, 16, 4, 2)
        served, found = 1 << 30, Launches(small, narrow, narrow, small, small)
    else:
        key = min(key for key in TABLE if key[0] == architecture and key[1] >= size and key[2] == itemsize)
        served, found = key[1], TABLE[key]
    for name in Launches._fields:
        given = launch_file.given(file, f"delta_rule.{name}", itemsize, launch_file.version(device))
        fitting = [largest for largest in given if size <= largest <= served]
        if fitting:
            found = found._replace(**{name: Launch(**given[min(fitting)])})
    return found


def segments(wide: Launch, recurrences: int, V: int, chunks: int, device: torch.device) -> int:
    """Into how many segments the passes along time cut each sequence, to keep the device busy.

    Segments cost two more passes, so that a few of them gain nothing, and short ones do not either.
    """
    count = min(_room(wide, recurrences, V, device), chunks // FEWEST_CHUNKS)
    # all of them have a chunk
    return -(-chunks // -(-chunks // count)) if count >= FEWEST_SEGMENTS else 1


def whole(wide: Launch, narrow: Launch | None, recurrences: int, V: int, device: torch.device) -> Launch:
    """The launch of a pass over sequences that are not cut."""
    return narrow if narrow and _room(wide, recurrences, V, device) > 1 else wide


def _room(wide: Launch, recurrences: int, V: int, device: torch.device) -> int:
    """How many times the device holds the programs of a pass."""
    return multiprocessors(device) // (recurrences * -(-V // wide.values))
