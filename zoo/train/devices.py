"""Peak FLOP/s of a device, and the peak memory used on it."""

import sys

import torch

# Dense bf16 FLOP/s of the tensor cores, from the data sheets; the first key contained in the device's name applies.
# (Lightning's `get_available_flops` looks for an H200 under names that no device has, and does not know the B200.)
PEAK_FLOPS = {
    "B200": 2.25e15,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "4090": 165e12,
    "3090": 71e12,
}


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 peak of a device in FLOP/s; None if unknown."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for model, flops in PEAK_FLOPS.items() if model in name), None)


def peak_memory(device: torch.device) -> int | None:
    """Most bytes that this process has had allocated on a device at once; None where that is not measured."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type != "cpu" or sys.platform == "win32":
        return None
    import resource  # missing on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
