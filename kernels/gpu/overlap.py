"""Kernels that start while the one in front of them still runs: programmatic dependent launch, on Hopper.

In decoding, kernels take a few microseconds, of which the start takes about one. A kernel launched with `overlap=True`
starts early, and calls `wait` before it reads what an earlier kernel wrote, or writes anything. Until then it may read
tensors of `kernels.read_only`, and `prefetch` others, which moves memory into L2, where it is never out of date. Every
program has to call `wait`: a kernel that waits for this one then also waits for all kernels before it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LINE = tl.constexpr(128)  # bytes that one prefetch moves
# Launches with more programs do not start early: programs that wait take room from the kernel in front of them.
MOST_EARLY = 128


@triton.jit
def wait(OVERLAP: tl.constexpr):
    """Let the next kernel start, and wait until all earlier ones have finished."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def prefetch(x, first, size, MOST: tl.constexpr, OVERLAP: tl.constexpr):
    """Start to load x[first : first + size] into L2, at least one number and at most MOST, unless x is None."""
    if OVERLAP and x is not None:
        STEP: tl.constexpr = LINE // (x.dtype.element_ty.primitive_bitwidth // 8)
        LINES: tl.constexpr = triton.next_power_of_2((MOST + STEP - 1) // STEP)
        at = first + tl.minimum(tl.arange(0, LINES) * STEP, size - 1)
        code: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
        tl.inline_asm_elementwise(code, "=r,l", [x + at], dtype=tl.int32, is_pure=False, pack=1)
