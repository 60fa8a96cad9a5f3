"""Launch configurations of the Triton kernels: block sizes, warps and stages, by architecture, head size and dtype.

They come from a table, not from autotuning: the first call costs one compilation, and no launch depends on the length.
Every entry was compiled ahead of time without large spills, and is tested on a device in outputs *and* gradients. Some
that look harmless compute nonsense on Hopper: `miscompilations.py` lists them, and a test keeps them out of this table.
Slices of 32 channels that are masked or whose rows are not aligned are wrong there, too
(`linear_recurrence/gpu/op.py`). Entries of a file take precedence (`launch_file.py`).
"""

from functools import cache
from typing import NamedTuple

import torch

from . import launch_file
from .device import HOPPER, OTHER, capability

ANY = 1 << 30  # heads of any size
HALF, SINGLE = 2, 4  # bytes per element


class LaunchConfig(NamedTuple):
    """One entry. A block is 0 if the kernel does not cut that axis."""

    warps: int
    stages: int
    block: int = 0  # linear recurrence: width of the slice of a state, or of the key channels, that one program holds
    keys: int = 0  # delta rule: block of key channels
    values: int = 0  # and of value channels


# kernel → (compute capability, largest head size that the entry serves, bytes per element). The size is the larger of K
# and V; for the delta rule, values beyond its largest keys count as these, and for the general one it is K alone.
TABLE: dict[str, dict[tuple[int, int, int], LaunchConfig]] = {
    "linear_recurrence.carry": {
        (HOPPER, 128, HALF): LaunchConfig(4, 2, block=64),
        (HOPPER, 256, HALF): LaunchConfig(4, 2, block=32),
        (HOPPER, 64, SINGLE): LaunchConfig(4, 2, block=16),
        (OTHER, 64, HALF): LaunchConfig(4, 2, block=32),
        (OTHER, 32, SINGLE): LaunchConfig(4, 2, block=16),
    },
    "linear_recurrence.local": {  # the pass without an output
        (HOPPER, 128, HALF): LaunchConfig(4, 3, block=128),
        (HOPPER, 256, HALF): LaunchConfig(4, 2, block=32),
        (HOPPER, 64, SINGLE): LaunchConfig(4, 2, block=16),
        (OTHER, 64, HALF): LaunchConfig(4, 2, block=32),
        (OTHER, 32, SINGLE): LaunchConfig(4, 2, block=16),
    },
    "linear_recurrence.head_scores": {
        (HOPPER, 256, HALF): LaunchConfig(4, 2, block=256),
        (HOPPER, 64, SINGLE): LaunchConfig(4, 2, block=64),
        (OTHER, 64, HALF): LaunchConfig(4, 2, block=64),
        (OTHER, 32, SINGLE): LaunchConfig(4, 2, block=32),
    },
    "linear_recurrence.channel_scores": {
        (HOPPER, 256, HALF): LaunchConfig(4, 2, block=32),
        (HOPPER, 64, SINGLE): LaunchConfig(4, 2, block=32),
        (OTHER, 64, HALF): LaunchConfig(4, 2, block=16),
        (OTHER, 32, SINGLE): LaunchConfig(4, 2, block=16),
    },
    "linear_recurrence.channel_grads": {
        (HOPPER, 256, HALF): LaunchConfig(4, 2, block=32),
        (HOPPER, 64, SINGLE): LaunchConfig(4, 2, block=16),
        (OTHER, 64, HALF): LaunchConfig(4, 2, block=16),
        (OTHER, 32, SINGLE): LaunchConfig(4, 2, block=16),
    },
    "linear_recurrence.step": {
        (HOPPER, ANY, HALF): LaunchConfig(4, 2, block=64),
        (HOPPER, ANY, SINGLE): LaunchConfig(4, 2, block=64),
        (OTHER, ANY, HALF): LaunchConfig(4, 2, block=32),
        (OTHER, ANY, SINGLE): LaunchConfig(4, 2, block=32),
    },
    "delta_rule.prepare": {
        (HOPPER, 64, HALF): LaunchConfig(4, 2, keys=64),
        (HOPPER, 128, HALF): LaunchConfig(4, 2, keys=128),
        (HOPPER, 2048, HALF): LaunchConfig(4, 2, keys=128),
        (HOPPER, 64, SINGLE): LaunchConfig(4, 2, keys=64),
        (HOPPER, 128, SINGLE): LaunchConfig(4, 2, keys=64),
        (HOPPER, 256, SINGLE): LaunchConfig(4, 2, keys=64),
        (OTHER, ANY, HALF): LaunchConfig(4, 2, keys=32),
        (OTHER, ANY, SINGLE): LaunchConfig(4, 2, keys=32),
    },
    "delta_rule.forward": {
        (HOPPER, 64, HALF): LaunchConfig(4, 3, values=64),
        (HOPPER, 128, HALF): LaunchConfig(4, 3, values=64),
        (HOPPER, 256, HALF): LaunchConfig(4, 2, values=32),
        (HOPPER, 64, SINGLE): LaunchConfig(4, 2, values=32),
        (HOPPER, 128, SINGLE): LaunchConfig(4, 2, values=16),
        (HOPPER, 256, SINGLE): LaunchConfig(4, 1, values=16),
        (OTHER, ANY, HALF): LaunchConfig(4, 2, values=16),
        (OTHER, ANY, SINGLE): LaunchConfig(4, 1, values=16),  # two stages need 108 to 180 KiB of shared memory
    },
    "delta_rule.backward": {
        (HOPPER, 64, HALF): LaunchConfig(4, 3, values=64),
        (HOPPER, 128, HALF): LaunchConfig(4, 3, values=64),
        (HOPPER, 256, HALF): LaunchConfig(4, 2, values=64),
        (HOPPER, 64, SINGLE): LaunchConfig(4, 2, values=32),
        (HOPPER, 128, SINGLE): LaunchConfig(4, 2, values=16),
        (HOPPER, 256, SINGLE): LaunchConfig(4, 1, values=16),
        (OTHER, ANY, HALF): LaunchConfig(4, 2, values=16),
        (OTHER, ANY, SINGLE): LaunchConfig(4, 1, values=16),  # two stages need 108 to 180 KiB of shared memory
    },
    "delta_rule.dq": {
        (HOPPER, 64, HALF): LaunchConfig(4, 2, keys=64, values=64),
        (HOPPER, 128, HALF): LaunchConfig(4, 2, keys=128, values=64),
        (HOPPER, 2048, HALF): LaunchConfig(4, 2, keys=128, values=64),
        (HOPPER, 64, SINGLE): LaunchConfig(4, 2, keys=64, values=32),
        (HOPPER, 128, SINGLE): LaunchConfig(4, 2, keys=64, values=32),
        (HOPPER, 256, SINGLE): LaunchConfig(4, 2, keys=64, values=32),
        (OTHER, ANY, HALF): LaunchConfig(4, 2, keys=32, values=32),
        (OTHER, ANY, SINGLE): LaunchConfig(4, 2, keys=32, values=32),
    },
    "delta_rule.dk": {
        (HOPPER, 64, HALF): LaunchConfig(4, 2, keys=64, values=64),
        (HOPPER, 128, HALF): LaunchConfig(4, 3, keys=64, values=32),
        (HOPPER, 2048, HALF): LaunchConfig(4, 2, keys=64, values=64),
        (HOPPER, 64, SINGLE): LaunchConfig(4, 2, keys=32, values=32),
        (HOPPER, 128, SINGLE): LaunchConfig(4, 2, keys=32, values=32),
        (HOPPER, 256, SINGLE): LaunchConfig(4, 2, keys=32, values=32),
        (OTHER, ANY, HALF): LaunchConfig(4, 2, keys=32, values=32),
        (OTHER, ANY, SINGLE): LaunchConfig(4, 2, keys=32, values=32),
    },
    "delta_rule.long": {  # instead of both where the state stays in memory
        (HOPPER, 2048, HALF): LaunchConfig(4, 3, keys=64, values=64),
        (OTHER, ANY, HALF): LaunchConfig(4, 1, keys=64, values=64),
    },
    "delta_rule.narrow": {  # instead of `forward` and `backward` where these would leave most of the device idle
        (HOPPER, 64, HALF): LaunchConfig(4, 3, values=32),
        (HOPPER, 128, HALF): LaunchConfig(4, 3, values=32),
    },
    "general_delta_rule.prepare": {  # of chunks with moderate decays; steep ones have one launch
        (HOPPER, 256, HALF): LaunchConfig(4, 3, keys=32),  # few registers: two programs per multiprocessor
        (HOPPER, 256, SINGLE): LaunchConfig(4, 3, keys=32),
        (OTHER, ANY, HALF): LaunchConfig(4, 1, keys=32),
        (OTHER, ANY, SINGLE): LaunchConfig(4, 1, keys=32),
    },
    "general_delta_rule.scalar_prepare": {  # with one decay per head
        (HOPPER, 128, HALF): LaunchConfig(4, 2, keys=128),
        (HOPPER, 256, HALF): LaunchConfig(4, 2, keys=64),
        (HOPPER, 256, SINGLE): LaunchConfig(4, 2, keys=64),
        (OTHER, ANY, HALF): LaunchConfig(4, 1, keys=64),
        (OTHER, ANY, SINGLE): LaunchConfig(4, 1, keys=64),
    },
    "general_delta_rule.forward": {
        (HOPPER, 128, HALF): LaunchConfig(4, 3, values=64),  # transposed states of 64 rows stay in registers
        (HOPPER, 256, HALF): LaunchConfig(4, 1, values=16),
        (HOPPER, 256, SINGLE): LaunchConfig(4, 1, values=16),
        (OTHER, ANY, HALF): LaunchConfig(4, 1, values=16),
        (OTHER, ANY, SINGLE): LaunchConfig(4, 1, values=16),
    },
    "general_delta_rule.backward": {
        (HOPPER, 128, HALF): LaunchConfig(4, 3, values=64),
        (HOPPER, 256, HALF): LaunchConfig(4, 1, values=16),
        (HOPPER, 256, SINGLE): LaunchConfig(4, 1, values=16),
        (OTHER, ANY, HALF): LaunchConfig(4, 1, values=16),
        (OTHER, ANY, SINGLE): LaunchConfig(4, 1, values=16),
    },
    "general_delta_rule.narrow": {  # instead of `forward` where that would leave half of the device idle
        (HOPPER, 128, HALF): LaunchConfig(4, 2, values=32),
    },
    "general_delta_rule.pairs": {
        (HOPPER, 256, HALF): LaunchConfig(4, 2, values=128),
        (HOPPER, 256, SINGLE): LaunchConfig(4, 2, values=32),
        (OTHER, ANY, HALF): LaunchConfig(4, 2, values=32),
        (OTHER, ANY, SINGLE): LaunchConfig(4, 2, values=32),
    },
    "general_delta_rule.gradients": {
        (HOPPER, 256, HALF): LaunchConfig(8, 1, keys=64, values=128),
        (HOPPER, 256, SINGLE): LaunchConfig(8, 1, keys=64, values=32),
        (OTHER, ANY, HALF): LaunchConfig(8, 1, keys=32, values=32),
        (OTHER, ANY, SINGLE): LaunchConfig(8, 1, keys=32, values=32),
    },
    "general_delta_rule.scalar_gradients": {
        (HOPPER, 256, HALF): LaunchConfig(4, 1, keys=64, values=64),
        (HOPPER, 256, SINGLE): LaunchConfig(8, 1, keys=64, values=32),
        (OTHER, ANY, HALF): LaunchConfig(8, 1, keys=32, values=32),
        (OTHER, ANY, SINGLE): LaunchConfig(8, 1, keys=32, values=32),
    },
}


def launch(kernel: str, size: int, dtype: torch.dtype, device: torch.device) -> LaunchConfig:
    """The entry for a head size (the larger of K and V)."""
    # the size may be symbolic while tracing
    entry = _entry(kernel, int(size), dtype.itemsize, capability(device), launch_file.current(), device)
    assert entry, f"{kernel} has no launch for heads of {size}"
    return entry


def optional(kernel: str, size: int, dtype: torch.dtype, device: torch.device) -> LaunchConfig | None:
    """Like `launch`, for a kernel that has no entry for some head sizes; None for those."""
    return _entry(kernel, int(size), dtype.itemsize, capability(device), launch_file.current(), device)


def largest(op: str, dtype: torch.dtype, device: torch.device) -> int:
    """The largest head that one program of every kernel of an op can hold."""
    return _largest(op, dtype.itemsize, capability(device), launch_file.current(), device)


# as in `backend.py`: the compiler does not need to trace the reading of files
largest._dynamo_marked_constant = True  # type: ignore[attr-defined]


def entries(
    kernel: str, itemsize: int, architecture: int, file: str | None, device: torch.device
) -> dict[int, LaunchConfig]:
    """The entries of a kernel by the largest head that they serve; those of a file override the built-in ones."""
    builtin = {key[1]: entry for key, entry in TABLE[kernel].items() if (key[0], key[2]) == (architecture, itemsize)}
    overrides = launch_file.given(file, kernel, itemsize, launch_file.version(device))
    return {**builtin, **{size: LaunchConfig(**entry) for size, entry in overrides.items()}}


@cache
def _largest(op: str, itemsize: int, architecture: int, file: str | None, device: torch.device) -> int:
    kernels = [kernel for kernel in TABLE if kernel.startswith(f"{op}.")]
    return min(max(entries(kernel, itemsize, architecture, file, device)) for kernel in kernels)


@cache
def _entry(
    kernel: str, size: int, itemsize: int, architecture: int, file: str | None, device: torch.device
) -> LaunchConfig | None:
    by_size = entries(kernel, itemsize, architecture, file, device)
    serving = [served for served in by_size if served >= size]
    return by_size[min(serving)] if serving else None
