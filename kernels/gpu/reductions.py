"""Sums of what several programs store: of gradients of shared parameters, and of the results of subheads."""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.allocation import new
from .launch import cdiv, enqueue, next_power_of_2

# A program's columns are one sector of memory; with this many rows at a time, few loads wait for one another.
COLUMNS, ROWS, WARPS = 8, 512, 4
TILE = 2048  # elements that a program adds to at a time
# A thread loads 16 bytes of a part, and the loads of several of these parts overlap.
OUTER_TILE, AHEAD = 512, 8


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
    if R * C:
        enqueue(add, cdiv(R * C, COLUMNS), parts, total, n, R=R, C=C, ROWS=ROWS, COLUMNS=COLUMNS, warps=WARPS)
    return total


@triton.jit(do_not_specialize=["n"])
def add_rows(parts, total, n, E: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    row, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = (row < n)[:, None] & (c < D)[None, :]
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    for e in tl.static_range(E):
        sums += tl.load(parts + (row.to(tl.int64)[:, None] * E + e) * D + c[None, :], mask=inside, other=0.0)
    tl.store(total + row.to(tl.int64)[:, None] * D + c[None, :], sums.to(total.dtype.element_ty), mask=inside)


def add_subheads(x: Tensor, subheads: int, out: Tensor | None = None) -> Tensor:
    """x [B,T,H·E,D], contiguous, summed in fp32 over the E subheads of each head: [B,T,H,D] in the dtype of x.

    Args:
        x: One tensor per subhead.
        subheads: E; if it is 1, x is returned.
        out: The contiguous result; allocated if None.
    """
    if subheads == 1:
        return x
    B, T, heads, D = x.shape
    total = new(x, B, T, heads // subheads, D) if out is None else out
    block = next_power_of_2(D)
    rows, count = max(1, TILE // block), B * T * (heads // subheads)
    enqueue(add_rows, cdiv(count, rows), x, total, count, E=subheads, D=D, BLOCK=block, ROWS=rows, warps=WARPS)
    return total


@triton.jit(do_not_specialize=["n"])
def add_outer_axis(parts, total, n, size, BLOCK: tl.constexpr, AHEAD: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, n, AHEAD):
        for i in tl.static_range(AHEAD):
            inside = (at < size) & (first + i < n)
            sums += tl.load(parts + tl.cast(first + i, tl.int64) * size + at, mask=inside, other=0.0)
    tl.store(total + at, sums.to(total.dtype.element_ty), mask=at < size)


def add_outer(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of contiguous parts [n,…] in fp32, in their order: PyTorch's depends on the sizes of all axes."""
    total = new(parts, *parts.shape[1:], dtype=dtype)
    size = total.numel()
    if size:
        sizes = {"BLOCK": OUTER_TILE, "AHEAD": AHEAD}
        enqueue(add_outer_axis, cdiv(size, OUTER_TILE), parts, total, len(parts), size, **sizes, warps=WARPS)
    return total


def add_heads(x: Tensor, groups: int, subheads: int) -> Tensor:
    """x [B,T,G·R·E,D], contiguous, summed in fp32 over the R value heads of each key head: [B,T,G·E,D] in its dtype.

    Args:
        x: Of each subhead of each value head.
        groups: R.
        subheads: E.
    """
    if groups == 1:
        return x
    B, T, heads, D = x.shape
    summed = add_subheads(x.view(B, T, heads // subheads, subheads * D), groups)
    return summed.view(B, T, heads // groups, D)
