"""Sums of what several programs store: of gradients of parameters that all share, and of neighbouring heads."""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..allocation import new
from .enqueue import cdiv, enqueue

# A program's columns are one sector of memory; with this many rows at a time, few loads wait for one another.
COLUMNS, ROWS, WARPS = 8, 512, 4
BLOCK = 1024  # 16 bytes a thread of half precision


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


@triton.jit(do_not_specialize=["n"])
def add_neighbours(x, total, n, R: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    first = x + (at // C * (R * C) + at % C)
    sums = tl.zeros([BLOCK], tl.float32)
    for r in tl.static_range(R):
        sums += tl.load(first + r * C, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + at, sums.to(total.dtype.element_ty), mask=inside)


def add_heads(x: Tensor, size: int, wide: int = 1) -> Tensor:
    """Sums over groups of neighbouring heads, accumulated in fp32: Σ_r of x [B,T,G·size·wide,D] as [B,T,G·wide,D].

    Args:
        x: Contiguous.
        size: Number of summands R.
        wide: Number of heads in a summand.
    """
    B, T, heads, D = x.shape
    total = new(x, B, T, heads // size, D)
    n = total.numel()
    enqueue(add_neighbours, (cdiv(n, BLOCK),), x, total, n, R=size, C=wide * D, BLOCK=BLOCK, num_warps=WARPS)
    return total
