"""Helpers of kernels over the rows of a matrix: tiles of rows and channels, and programs that walk over many rows."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device import multiprocessors
from .launch import cdiv, enqueue, next_power_of_2


@triton.jit
def load(x, at, inside):
    """The numbers at these offsets in fp32, zeros outside."""
    return tl.load(x + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def per_channel(vector, c, C: tl.constexpr):
    return load(vector, c, c < C)[None, :]


@triton.jit
def shifted(x, bias, at, inside, c, C: tl.constexpr):
    """x + bias in fp32."""
    wide = load(x, at, inside)
    if bias is not None:
        wide += per_channel(bias, c, C)
    return wide


@triton.jit
def tile_of(first, rows, stride, c, C: tl.constexpr, ROWS: tl.constexpr):
    """Offsets of the rows from `first` on, in a strided and in a dense tensor, and the mask of those that exist."""
    r, c = (first + tl.arange(0, ROWS))[:, None].to(tl.int64), c[None, :]
    return r * stride + c, r * C + c, (r < rows) & (c < C)


@triton.jit
def head_tile_of(first, rows, stride, head, c, SIZE: tl.constexpr, ROWS: tl.constexpr):
    """Offsets of a head's channels in the rows from `first` on, and the mask of those that exist."""
    r = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    return r * stride + head * SIZE + c[None, :], (r < rows) & (c < SIZE)[None, :]


def rows_of(x: Tensor) -> tuple[Tensor, int, int]:
    """x […,C] with the numbers of a row contiguous, the number of rows, and their stride."""
    rows, size = x.numel() // max(x.shape[-1], 1), x.shape[-1]
    if not x.is_contiguous():
        x = x[None] if x.dim() == 1 else x.flatten(0, -2)
        if x.stride(1) == 1:
            return x, rows, x.stride(0)
    return x.contiguous(), rows, size


COPIED = 4096  # elements of a program


@triton.jit(do_not_specialize=["rows"])
def copy_tile(x, y, rows, x_row, y_row, C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    source, _, inside = tile_of(tl.program_id(0) * ROWS, rows, x_row, c, C, ROWS)
    target, _, _ = tile_of(tl.program_id(0) * ROWS, rows, y_row, c, C, ROWS)
    tl.store(y + target, tl.load(x + source, mask=inside), mask=inside)


def copy_rows(x: Tensor, y: Tensor) -> None:
    """Copy x […,C] to y, whose rows may be apart. PyTorch's copy is slow there, since it moves few bytes at a time.

    Args:
        x: The source.
        y: The target, with a stride of 1 along the last axis and the same stride between all rows.
    """
    (x, rows, x_row), C = rows_of(x), x.shape[-1]
    block = next_power_of_2(C)
    tile = {"C": C, "ROWS": max(1, COPIED // block), "BLOCK": block}
    if rows:
        enqueue(copy_tile, cdiv(rows, tile["ROWS"]), x, y, rows, x_row, row_stride(y), **tile)


PUT = tl.constexpr(6)  # tensors of a launch of `put`
WIDE = 1024  # elements of a row that are copied together


@triton.jit
def put_row(x, memory, at, PLACE: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr):
    program = tl.program_id(0)
    if memory is not None:  # noqa: SIM102 - known when it is compiled
        if program % PUT == PLACE:
            row = (program // PUT).to(tl.int64)
            for first in tl.static_range(0, C, WIDE):
                c = first + tl.arange(0, WIDE)
                tl.store(memory + tl.load(at + row) * C + c, tl.load(x + row * C + c, mask=c < C), mask=c < C)


@triton.jit
def put(
    at, x0, y0, x1, y1, x2, y2, x3, y3, x4, y4, x5, y5,
    C0: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr, C3: tl.constexpr, C4: tl.constexpr, C5: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """A program for each row of each of `PUT` tensors."""
    put_row(x0, y0, at, 0, C0, WIDE)
    put_row(x1, y1, at, 1, C1, WIDE)
    put_row(x2, y2, at, 2, C2, WIDE)
    put_row(x3, y3, at, 3, C3, WIDE)
    put_row(x4, y4, at, 4, C4, WIDE)
    put_row(x5, y5, at, 5, C5, WIDE)


def put_rows(rows: Sequence[Tensor], memories: Sequence[Tensor], at: Tensor) -> None:
    """Write rows [B,C] of each tensor to the places `at` [B] of a contiguous memory [N,C]."""
    every = list(zip(rows, memories, strict=True)) if len(at) else []
    for first in range(0, len(every), PUT.value):
        pairs = every[first : first + PUT.value]
        missing = PUT.value - len(pairs)
        tensors = [x for row, memory in pairs for x in (row.contiguous(), memory)] + [None, None] * missing
        widths = [row.shape[1] for row, _ in pairs] + [1] * missing
        enqueue(put, PUT.value * len(at), at, *tensors, **{f"C{i}": width for i, width in enumerate(widths)}, WIDE=WIDE)


def row_stride(x: Tensor) -> int:
    """The stride between the rows of x […,C], into which a kernel writes.

    Raises:
        RuntimeError: The rows have different strides.
    """
    return x.view(-1, x.shape[-1]).stride(0)


def walkers(rows: int, tile: int, device: torch.device, resident: int, blocks: int = 1) -> int:
    """Number of programs that walk over the tiles of rows of each block of channels, `resident` per multiprocessor."""
    return min(cdiv(rows, tile), max(1, multiprocessors(device) * resident // blocks))
