"""Launch entries from a file, as `cli.py tune` writes it. On its GPU they take precedence over the built-in ones.

The environment variable ``ZOO_LAUNCH`` names the file for a whole process; :func:`launch_file` takes precedence.

    {"capability": [8, 0], "entries": [
      {"kernel": "linear_recurrence.carry", "size": 128, "itemsize": 2, "block": 32, "warps": 4, "stages": 2},
      {"kernel": "delta_rule.dq", "size": 128, "itemsize": 2, "keys": 64, "values": 32, "warps": 4, "stages": 2}]}

`size` is the largest head that an entry serves. Among the entries for a kernel, built-in or not, the smallest size that
serves a head is used.
"""

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import UserError
from .miscompilations import miscompiled

log = logging.getLogger(__name__)

VARIABLE = "ZOO_LAUNCH"
NAMES = {
    "linear_recurrence": ("carry", "local", "head_scores", "channel_scores", "channel_grads", "step"),
    "delta_rule": ("prepare", "forward", "backward", "dq", "dk", "long", "narrow"),
    "general_delta_rule": (
        "prepare",
        "scalar_prepare",
        "forward",
        "backward",
        "narrow",
        "pairs",
        "gradients",
        "scalar_gradients",
    ),
}
NUMBERS = {
    "linear_recurrence": ("block", "warps", "stages"),
    "delta_rule": ("keys", "values", "warps", "stages"),
    "general_delta_rule": ("keys", "values", "warps", "stages"),
}
# the numbers in an entry, by kernel
KERNELS = {f"{op}.{name}": NUMBERS[op] for op, names in NAMES.items() for name in names}
# a kernel that does not cut an axis has a block of 0 there
ALLOWED: dict[str, tuple[int, ...]] = {
    "warps": (1, 2, 4, 8, 16),
    "stages": tuple(range(1, 9)),
    "itemsize": (2, 4),
    "block": (16, 32, 64, 128, 256),
    "keys": (0, 16, 32, 64, 128, 256),
    "values": (0, 16, 32, 64, 128, 256),
}
Entries = dict[tuple[str, int], dict[int, dict[str, int]]]


class LaunchFile(NamedTuple):
    """The contents of a file: its GPU, and the launches by kernel and bytes per element, then by head size."""

    capability: tuple[int, int]
    entries: Entries


# not a context variable: gradients are computed in threads that do not inherit those
_current: str | None = os.environ.get(VARIABLE) or None


def current() -> str | None:
    """The path of the file in force, or None."""
    return _current


@contextmanager
def launch_file(path: str | Path | None) -> Iterator[None]:
    """Use the launches in this file inside the ``with`` block; None for the built-in ones alone."""
    global _current
    before, _current = _current, None if path is None else str(path)
    try:
        yield
    finally:
        _current = before


@cache
def version(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of a GPU; None for any other device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def given(path: str | None, kernel: str, itemsize: int, gpu: tuple[int, int] | None) -> Mapping[int, dict[str, int]]:
    """The launches of a kernel in a file, by head size; none if the file is for another GPU.

    Raises:
        UserError: The file cannot be read, or something in it is wrong.
    """
    if path is None or gpu is None or not _for(path, gpu):
        return {}
    return read(path).entries.get((kernel, itemsize), {})


@cache
def _for(path: str, gpu: tuple[int, int]) -> bool:
    meant = read(path).capability
    if meant != gpu:
        numbers = (*meant, *gpu)
        log.warning("%s is not used: it is for compute capability %d.%d, not for %d.%d", path, *numbers)
    return meant == gpu


@cache
def read(path: str) -> LaunchFile:
    """Read and check a file.

    Raises:
        UserError: The file cannot be read, or something in it is wrong.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{VARIABLE}: cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{VARIABLE}: {path} is not JSON: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("entries"), list):
        raise UserError(f"{VARIABLE}: {path} has no list of entries")
    capability = content.get("capability")
    if not (isinstance(capability, list) and len(capability) == 2 and all(type(x) is int for x in capability)):
        raise UserError(f"{VARIABLE}: {path}: capability: expected two whole numbers, got {capability!r}")
    entries: Entries = {}
    for number, entry in enumerate(content["entries"]):
        if wrong := _mistake(entry):
            raise UserError(f"{VARIABLE}: {path}: entry {number}: {wrong}")
        launch = {name: entry[name] for name in KERNELS[entry["kernel"]]}
        if pattern := miscompiled(entry["kernel"], launch, capability[0]):
            raise UserError(f"{VARIABLE}: {path}: entry {number}: {entry['kernel']} is wrong on Hopper: {pattern.says}")
        entries.setdefault((entry["kernel"], entry["itemsize"]), {})[entry["size"]] = launch
    return LaunchFile((capability[0], capability[1]), entries)


def _mistake(entry: Any) -> str | None:
    """Describe the mistake in an entry; None if there is none."""
    if not isinstance(entry, dict):
        return f"expected an object, got {entry!r}"
    if (kernel := entry.get("kernel")) not in KERNELS:
        return f"kernel: {kernel!r} is not one of {', '.join(KERNELS)}"
    names = {"kernel", "size", "itemsize", *KERNELS[kernel]}
    if entry.keys() != names:
        return f"expected the keys {', '.join(sorted(names))}, got {', '.join(sorted(map(str, entry)))}"
    if type(entry["size"]) is not int or entry["size"] < 1:
        return f"size: expected a whole number from 1, got {entry['size']!r}"
    for name, allowed in ALLOWED.items():
        if name in names and (type(entry[name]) is not int or entry[name] not in allowed):
            return f"{name}: {entry[name]!r} is not one of {', '.join(map(str, allowed))}"
    return None
