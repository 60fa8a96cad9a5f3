"""Launch configurations of the Triton kernels: block sizes, warps and stages, by architecture, head size and dtype.

They come from a table, `launches.csv`, and not from autotuning: the first call costs one compilation, and no launch
depends on the length. Every entry was compiled ahead of time without large spills, and is tested on a device in outputs
*and* gradients. Some that look harmless compute nonsense on Hopper: `miscompilations.py` lists them, and a test keeps
them out of this table. Slices of 32 channels that are masked or whose rows are not aligned are wrong there, too
(`linear_recurrence/gpu/op.py`).
"""

import csv
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from .device import capability

ANY = 1 << 30  # heads of any size


class LaunchConfig(NamedTuple):
    """One entry. A block is 0 if the kernel does not cut that axis."""

    warps: int
    stages: int
    block: int = 0  # linear recurrence: width of the slice of a state, or of the key channels, that one program holds
    # and attention: queries per block
    keys: int = 0  # delta rule: block of key channels; attention: keys per block
    values: int = 0  # and of value channels


def _built_in() -> dict[str, dict[tuple[int, int, int], LaunchConfig]]:
    table: dict[str, dict[tuple[int, int, int], LaunchConfig]] = {}
    with Path(__file__).with_name("launches.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            key = int(row["capability"]), ANY if row["size"] == "any" else int(row["size"]), int(row["itemsize"])
            numbers = {name: int(row[name]) for name in LaunchConfig._fields}
            table.setdefault(row["kernel"], {})[key] = LaunchConfig(**numbers)
    return table


# kernel → (compute capability, largest head size that the entry serves, bytes per element). The size is the larger of K
# and V; for the delta rule, values beyond its largest keys count as these, and for the general one it is K alone.
TABLE = _built_in()


def launch(kernel: str, size: int, dtype: torch.dtype, device: torch.device) -> LaunchConfig:
    """The entry for a head size (the larger of K and V)."""
    # the size may be symbolic while tracing
    entry = _entry(kernel, int(size), dtype.itemsize, capability(device))
    assert entry, f"{kernel} has no launch for heads of {size}"
    return entry


def optional(kernel: str, size: int, dtype: torch.dtype, device: torch.device) -> LaunchConfig | None:
    """Like `launch`, for a kernel that has no entry for some head sizes; None for those."""
    return _entry(kernel, int(size), dtype.itemsize, capability(device))


def largest(op: str, dtype: torch.dtype, device: torch.device) -> int:
    """The largest head that one program of every kernel of an op can hold."""
    return _largest(op, dtype.itemsize, capability(device))


# as in `backend.py`: the compiler does not need to trace the table
largest._dynamo_marked_constant = True  # type: ignore[attr-defined]


def entries(kernel: str, itemsize: int, architecture: int) -> dict[int, LaunchConfig]:
    """The entries of a kernel by the largest head that they serve."""
    return {key[1]: entry for key, entry in TABLE[kernel].items() if (key[0], key[2]) == (architecture, itemsize)}


@cache
def _largest(op: str, itemsize: int, architecture: int) -> int:
    kernels = [kernel for kernel in TABLE if kernel.startswith(f"{op}.")]
    return min(max(entries(kernel, itemsize, architecture)) for kernel in kernels)


@cache
def _entry(kernel: str, size: int, itemsize: int, architecture: int) -> LaunchConfig | None:
    by_size = entries(kernel, itemsize, architecture)
    serving = [served for served in by_size if served >= size]
    return by_size[min(serving)] if serving else None
