"""Properties of a GPU that the choice of kernels depends on."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch
import triton

log = logging.getLogger(__name__)

HOPPER, OTHER = 9, 0  # architectures of the launch table
TESTED = ("3.6", "3.7")  # Triton versions whose `CompiledKernel.run` takes the arguments of `launch.py`, with Gluon
DIRECT = triton.__version__.startswith(tuple(f"{version}." for version in TESTED))


class Gpu(NamedTuple):
    """A model of GPU."""

    capability: tuple[int, int]
    multiprocessors: int


GPUS = {
    "A100": Gpu((8, 0), 108),
    "L40S": Gpu((8, 9), 142),
    "RTX 4090": Gpu((8, 9), 128),
    "H100": Gpu((9, 0), 132),
    "H200": Gpu((9, 0), 132),
    "B200": Gpu((10, 0), 148),
}
_assumed: Gpu | None = None


@contextmanager
def assumed(gpu: Gpu) -> Iterator[None]:
    """Choose kernels as on this GPU inside the ``with`` block, whatever device the tensors are on."""
    global _assumed
    before, _assumed = _assumed, gpu
    try:
        yield
    finally:
        _assumed = before


def capability(device: torch.device) -> int:
    """The architecture in the launch table: HOPPER or OTHER."""
    if _assumed is not None:
        return HOPPER if _assumed.capability[0] == HOPPER else OTHER
    return _capability(device)


@cache
def _capability(device: torch.device) -> int:
    if device.type != "cuda":  # the interpreter runs the entries that are tested on the device
        return HOPPER
    major, minor = torch.cuda.get_device_capability(device)
    if major == HOPPER:
        return HOPPER
    log.warning("launches: no entries for compute capability %d.%d, using cautious ones", major, minor)
    return OTHER


def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors; 1 without a GPU."""
    return _assumed.multiprocessors if _assumed is not None else _multiprocessors(device)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def runs_gluon(device: torch.device) -> bool:
    """Return whether the kernels in Gluon run on a device: a Hopper GPU, with a tested version of Triton."""
    if (device.type != "cuda" and _assumed is None) or capability(device) != HOPPER:
        return False
    if not DIRECT and _assumed is None:
        _say(without_gluon())
    return DIRECT


def without_gluon() -> str | None:
    """Why a Hopper GPU runs no kernels in Gluon; None if it does."""
    versions = " and ".join(TESTED)
    reason = f"kernels in Gluon are left out, as they were tested with {versions} only, which is slower on Hopper"
    return None if DIRECT else f"Triton {triton.__version__}: {reason}"


@cache
def _say(message: str | None) -> None:
    log.warning("%s", message)


def overlaps(device: torch.device) -> bool:
    """Return whether kernels can start before the one in front of them has finished: on Hopper, as `runs_gluon`."""
    return device.type == "cuda" and runs_gluon(device)


# as in `core/backend.py`: the compiler can trace neither caches nor queries of a device
multiprocessors._dynamo_marked_constant = True  # type: ignore[attr-defined]
runs_gluon._dynamo_marked_constant = True  # type: ignore[attr-defined]
