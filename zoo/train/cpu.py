"""Process-wide settings that speed up training on a CPU: oneDNN matrix products, and memory kept for reuse."""

import ctypes
import sys

import torch

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
