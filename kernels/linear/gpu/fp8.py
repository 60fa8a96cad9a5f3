"""Factors of FP8 products: their rows or columns are scaled in Triton, for PyTorch's product."""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.allocation import new
from ...gpu.launch import cdiv, enqueue, next_power_of_2
from ...gpu.rows import load
from .. import fp8

BLOCK, ROW_WARPS = 4096, 8  # of a program that scales a row
ROWS, COLUMNS, WARPS = 128, 64, 4  # of a tile that is transposed
FLOOR, LARGEST = tl.constexpr(fp8.FLOOR), tl.constexpr(fp8.LARGEST)


@triton.jit
def scale_rows(x, y, scales, stride, K, BLOCK: tl.constexpr):
    """One row of x: its scale, and its numbers divided by it."""
    row = tl.program_id(0).to(tl.int64)
    magnitudes = tl.zeros([BLOCK], tl.float32)
    for first in range(0, K, BLOCK):
        c = first + tl.arange(0, BLOCK)
        magnitudes = tl.maximum(magnitudes, tl.abs(load(x + row * stride, c, c < K)))
    scale = tl.maximum(tl.max(magnitudes, 0), FLOOR) / LARGEST
    tl.store(scales + row, scale)
    for first in range(0, K, BLOCK):  # again, from the cache
        c = first + tl.arange(0, BLOCK)
        value = load(x + row * stride, c, c < K) * (1 / scale)
        tl.store(y + row * K + c, value.to(y.dtype.element_ty), mask=c < K)


@triton.jit
def largest_of_columns(x, largest, stride, R, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The largest magnitude of each column, of which every program reads a tile; `largest` starts as zeros."""
    BLOCKS: tl.constexpr = (C + COLUMNS - 1) // COLUMNS
    r = tl.program_id(0) // BLOCKS * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(0) % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    tile = load(x, r[:, None].to(tl.int64) * stride + c[None, :], (r < R)[:, None] & (c < C)[None, :])
    tl.atomic_max(largest + c, tl.max(tl.abs(tile), 0), mask=c < C)


@triton.jit
def scale_columns(x, largest, y, scales, stride, R, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """y [C,R]: the numbers of each column of x [R,C] divided by its scale."""
    BLOCKS: tl.constexpr = (C + COLUMNS - 1) // COLUMNS
    r = tl.program_id(0) // BLOCKS * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(0) % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    inside = (r < R)[:, None] & (c < C)[None, :]
    tile = load(x, r[:, None].to(tl.int64) * stride + c[None, :], inside)
    scale = tl.maximum(load(largest, c, c < C), FLOOR) / LARGEST
    tile = (tile * (1 / scale)[None, :]).to(y.dtype.element_ty)
    if tl.program_id(0) < BLOCKS:
        tl.store(scales + c, scale, mask=c < C)
    tl.store(y + c[:, None].to(tl.int64) * R + r[None, :], tl.trans(tile), mask=tl.trans(inside))


def scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M,K] as contiguous e4m3 numbers, and the scale [M,1] in fp32 of each row; x may be a transposed view."""
    (M, K), scales = x.shape, new(x, len(x), 1, dtype=torch.float32)
    y = new(x, M, K, dtype=fp8.FORMAT)
    if x.stride(1) == 1:
        enqueue(scale_rows, M, x, y, scales, x.stride(0), K, BLOCK=min(BLOCK, next_power_of_2(K)), warps=ROW_WARPS)
        return y, scales
    x = x.mT if x.stride(0) == 1 else x.mT.contiguous()
    largest = torch.zeros(M, device=x.device)
    programs, tile = cdiv(K, ROWS) * cdiv(M, COLUMNS), {"C": M, "ROWS": ROWS, "COLUMNS": COLUMNS}
    enqueue(largest_of_columns, programs, x, largest, x.stride(0), K, **tile, warps=WARPS)
    enqueue(scale_columns, programs, x, largest, y, scales, x.stride(0), K, **tile, warps=WARPS)
    return y, scales


def product(a: Tensor, b: Tensor) -> Tensor:
    """a [M,K] times b [K,N] in bf16."""
    return fp8.multiplied(scaled(a), scaled(b.mT))
