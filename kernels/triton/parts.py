"""Gradients of parameters that all programs share: the parts that programs store are added up in one launch."""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..allocation import new
from .enqueue import cdiv, enqueue

# A program's columns are one sector of memory; with this many rows at a time, few loads wait for one another.
COLUMNS, ROWS, WARPS = 8, 512, 4


@triton.jit(do_not_specialize=["n"])
def add(parts, total, n, R: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < R * C
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in tl.range(0, n, ROWS):
        part = (first + tl.arange(0, ROWS))[:, None]
        sums += tl.load(parts + part.to(tl.int64) * (R * C) + at[None, :], mask=(part < n) & inside[None, :], other=0.0)
    tl.store(total + at % C * R + at // C, tl.sum(sums, 0).to(total.dtype.element_ty), mask=inside)


def add_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Σ_n of parts [n,R,C] in fp32, as [C,R] of `dtype`."""
    n, R, C = parts.shape
    total = new(parts, C, R, dtype=dtype)
    enqueue(add, (cdiv(R * C, COLUMNS),), parts, total, n, R=R, C=C, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS)
    return total
