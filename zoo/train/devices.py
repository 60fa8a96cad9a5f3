"""Devices: choosing one, its peak FLOP/s and memory, copies of batches to it, and settings of the process that speed up
training on a CPU.
"""

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from kernels import UserError
from mixers import did_you_mean
from zoo.data.batch import Batch

# Dense bf16 FLOP/s of the tensor cores, bytes per second of the memory, and its GiB, from the data sheets; the first
# key that is in the name of a device applies. (Lightning's `get_available_flops` looks for an H200 under names that no
# device has, and does not know the B200.)
PEAKS = {
    "B200": (2.25e15, 8.0e12, 178),
    "H200": (989e12, 4.8e12, 140),
    "H100 PCIe": (756e12, 2.0e12, 80),
    "H100 NVL": (835e12, 3.9e12, 94),
    "H100": (989e12, 3.35e12, 80),
    "A100-SXM4-80GB": (312e12, 2.04e12, 80),
    "A100 80GB": (312e12, 1.94e12, 80),
    "A100": (312e12, 1.56e12, 40),
    "L40S": (362e12, 864e9, 48),
    "L4": (121e12, 300e9, 24),
    "4090": (165e12, 1008e9, 24),
    "3090": (71e12, 936e9, 24),
}


def pick_device(name: str | None) -> torch.device:
    """The named device, by default the GPU if available.

    Raises:
        UserError: The name is unknown, or no GPU is available.
    """
    available = torch.cuda.is_available()
    if name is None:
        return torch.device("cuda" if available else "cpu")
    if name not in ("cpu", "cuda"):
        raise UserError(f"device: {name!r} is not one of cpu, cuda{did_you_mean(name, ['cpu', 'cuda'])}")
    if name == "cuda" and not available:
        raise UserError("device: PyTorch finds no CUDA device on this machine; leave device out to run on the CPU")
    return torch.device(name)


def check_device(device: torch.device | str, *, meta: bool = True) -> None:
    """Raise a UserError if PyTorch does not know a device, or cannot use it here.

    Args:
        device: The device.
        meta: Whether it may be the meta device, on which nothing is computed.
    """
    name, names = str(device), f"cpu, cuda, cuda:0, mps{', meta' if meta else ''}"
    if name.partition(":")[0] == "meta" and not meta:
        raise UserError(f"device: {name} is for models without weights; names are {names}")
    if name.partition(":")[0] == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"device: {name} cannot be used here, as PyTorch finds no CUDA device; leave it out, or use cpu"
        )
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:  # unknown, or not usable by this PyTorch
        reason = "" if "device type" in str(error) else f" ({str(error).splitlines()[0]})"
        raise UserError(f"device: {name} cannot be used here{reason}; names are {names}") from None


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 peak of a device in FLOP/s; None if unknown."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((flops for model, (flops, *_) in PEAKS.items() if model in name), None)


def peak_memory(device: torch.device) -> int | None:
    """Peak number of bytes that this process has allocated on a device; None where that is not measured."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type != "cpu" or sys.platform == "win32":
        return None
    import resource  # missing on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def free_memory() -> int | None:
    """Number of bytes of host memory that this process may still use, None if unknown."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = 1024 * int(fields["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return None
    try:
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
    except (OSError, ValueError):  # no such file, or no limit
        return free
    return min(free, limit - used)


# constants of glibc and Linux
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, MADV_HUGEPAGE = -1, -2, -3, 14
PAGE, ROOM = 2**21, 2**30  # bytes: of a huge page; of memory to place in huge pages


def use_processor(*, deterministic: bool = False) -> None:
    """Prepare this process for training on a CPU.

    With `deterministic`, products stay with the library that other processes use, such as one that samples.
    """
    if not deterministic:
        fast_products()
    keep_memory()


def fast_products() -> bool:
    """Use oneDNN for fp32 matrix products on the CPU, if it keeps full fp32 precision; return whether it does.

    MKL does not use AVX-512 on some processors and takes twice as long. PyTorch calls oneDNN only if rounding to bf16
    is allowed, and oneDNN does round where the hardware has bf16 units (AMX); a trial product tells.
    """
    before = torch.get_float32_matmul_precision()
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(256, 256, generator=generator) for _ in range(2))
    exact = x.double() @ y.double()
    torch.set_float32_matmul_precision("medium")
    if float((x @ y - exact).norm() / exact.norm()) < 1e-6:
        return True
    torch.set_float32_matmul_precision(before)
    return False


def keep_memory() -> bool:
    """Make the C library keep freed memory for the next step, in huge pages; return whether it does.

    By default glibc returns large blocks to the system, which zeroes them when they are allocated again: thousands of
    page faults per step. Other C libraries have no such setting.
    """
    if sys.platform != "linux" or not hasattr(library := ctypes.CDLL(None), "mallopt"):
        return False
    library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    highest = {M_TRIM_THRESHOLD: 2**31 - 1, M_MMAP_THRESHOLD: 2**25, M_TOP_PAD: ROOM}
    kept = all([library.mallopt(*option) == 1 for option in highest.items()])
    block = library.malloc(PAGE)  # with ROOM reserved above it, which takes no memory until it is used
    library.madvise(-(-block // PAGE) * PAGE, ROOM - PAGE, MADV_HUGEPAGE)  # a hint: systems may refuse
    library.free(block)
    library.mallopt(M_TOP_PAD, 2**17)
    return kept


class CopyStream:
    """Copies batches to a GPU while it still computes the previous step.

    The host launches steps before the GPU can run them. A copy in the stream of the computation would start after all
    of these steps, and the next one would wait for it; and the host would wait for them if the batch were not in
    page-locked memory. In a separate stream a copy starts immediately.

    Args:
        device: Device of the copies. On a CPU, batches are copied without a stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copied(self, batch: Batch, move: Callable[[], Batch]) -> Batch:
        """Return the result of `move`, which copies the batch; what is computed next waits for the copy."""
        if self._stream is None or batch.tokens.device.type != "cpu":
            return move()
        with torch.cuda.stream(self._stream):
            copy = move()
        computation = torch.cuda.current_stream(self._stream.device)
        computation.wait_stream(self._stream)
        for x in copy:
            if x is not None:
                x.record_stream(computation)  # otherwise the next copy could get this memory before it is read
        return copy
