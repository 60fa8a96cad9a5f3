"""What makes training on a processor faster, for the whole process: oneDNN's products, and memory that is kept."""

import ctypes
import sys

import torch

# of glibc and Linux
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, MADV_HUGEPAGE = -1, -2, -3, 14
PAGE, ROOM = 2**21, 2**30  # a large page; for how much memory they are asked


def use_processor() -> None:
    """Prepare this process for training on a processor."""
    fast_products()
    keep_memory()


def fast_products() -> bool:
    """Let oneDNN compute fp32 products on the processor, where its fp32 is fp32; whether it does.

    MKL leaves AVX-512 unused on some processors, and takes twice as long. PyTorch asks oneDNN only if it is allowed to
    round to bf16, which it does where there are units for that (AMX); so a product is tried out.
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
    """Let the C library keep memory that is freed, for the next step, and lay it in large pages; whether it does.

    glibc gives large pieces back to the system, which fills them with zeros when they are asked for again: thousands
    of page faults a step. Other C libraries cannot be asked.
    """
    if sys.platform != "linux" or not hasattr(library := ctypes.CDLL(None), "mallopt"):
        return False
    library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    highest = {M_TRIM_THRESHOLD: 2**31 - 1, M_MMAP_THRESHOLD: 2**25, M_TOP_PAD: ROOM}
    kept = all([library.mallopt(*option) == 1 for option in highest.items()])
    piece = library.malloc(PAGE)  # with room above it, of which nothing is in memory until it is used
    library.madvise(-(-piece // PAGE) * PAGE, ROOM - PAGE, MADV_HUGEPAGE)  # only a wish: systems may refuse
    library.free(piece)
    library.mallopt(M_TOP_PAD, 2**17)
    return kept
