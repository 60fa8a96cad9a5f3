"""Autocast of a device, also of the meta device, which has none and on which FLOPs are counted."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of matrix products under autocast on a device; None if it is off or the device has none."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Compute in the dtypes of the inputs: autocast is switched off, but only if it is on, since this takes time."""
    return nullcontext() if autocast_dtype(device) is None else torch.autocast(device.type, enabled=False)
