"""A benchmark's device: its description, its peak speed, and the dtypes and backends to choose from."""

import importlib.metadata
import os
import platform
from typing import Any

import torch

from kernels import BACKENDS
from zoo.arguments import check_names
from zoo.train.devices import PEAKS, peak_flops

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def pick_dtype(name: str | None, device: torch.device) -> str:
    """The named dtype, by default bf16 on a GPU and fp32 on a CPU."""
    name = name or ("bf16" if device.type == "cuda" else "fp32")
    check_names("dtype", [name], DTYPES)
    return name


def pick_backend(name: str | None) -> str:
    """The named backend, by default that of `ZOO_BACKEND`, or auto."""
    name = name or os.environ.get("ZOO_BACKEND", "auto")
    check_names("backend", [name], BACKENDS)
    return name


def described(device: torch.device) -> dict[str, Any]:
    """Name of the device, and versions of packages."""
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else f"cpu, {torch.get_num_threads()} threads",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "fla": version("flash-linear-attention"),
        "flash_qla": version("flash-qla"),
    }


def version(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def roofline_ms(device: torch.device, dtype: str, flops: float, moved: float) -> float | None:
    """The shortest possible time in ms for `flops` and `moved` bytes; None if the device's peak is unknown."""
    peak = None if dtype == "fp32" else peak_flops(device)
    if peak is None:
        return None
    name = torch.cuda.get_device_name(device)
    bandwidth = next((rate for model, (_, rate, _) in PEAKS.items() if model in name), None)
    return None if bandwidth is None else max(flops / peak, moved / bandwidth) * 1e3
