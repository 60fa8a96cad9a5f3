"""Products of a few rows with a weight: every program reads some of its rows once, for all rows of the input.

Up to four rows are multiplied elementwise, more of them (of 16 bits) on the tensor cores.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"
# ruff: noqa: RUF005

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import op
from ..allocation import new
from ..triton.enqueue import cdiv, enqueue, next_power_of_2
from ..triton.launches import multiprocessors
from . import BY_ELEMENTS

INPUTS, OUTPUTS, WARPS = 1024, 16, 4  # of a tile of the weight
PROGRAMS = 1.5  # per multiprocessor, at least, where there are as many outputs
TILE_INPUTS, STAGES = 128, 4


@triton.jit
def part(x, at, inside, I: tl.constexpr, GATE: tl.constexpr):
    """A part of a row of x, or of the gated product of its two halves."""
    value = tl.load(x + at, mask=inside, other=0.0)
    if GATE != "none":
        gate, up = value.to(tl.float32), tl.load(x + at + I, mask=inside, other=0.0).to(tl.float32)
        if GATE == "silu":
            gate *= tl.sigmoid(gate)
        value = (gate * up).to(value.dtype)  # as the product rounds it that many rows have
    return value.to(tl.float32)


@triton.jit(do_not_specialize=["O"])
def linear_rows(
    x,  # [ROWS,I], or [ROWS,2·I] with a gate
    weight,  # [O,I]
    bias,  # [O]
    y,  # [ROWS,O]
    x_row,
    O,
    I: tl.constexpr,
    ROWS: tl.constexpr,
    GATE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    sums = ()
    for _ in tl.static_range(ROWS):
        sums = sums + (tl.zeros([OUTPUTS, INPUTS], tl.float32),)
    for first in tl.static_range(0, I, INPUTS):
        k = first + tl.arange(0, INPUTS)
        inside = (n < O)[:, None] & (k < I)[None, :]
        w = tl.load(weight + n[:, None].to(tl.int64) * I + k[None, :], mask=inside, other=0.0).to(tl.float32)
        longer = ()
        for m in tl.static_range(ROWS):
            longer = longer + (sums[m] + w * part(x, m * x_row + k, k < I, I, GATE)[None, :],)
        sums = longer
    added = tl.zeros([OUTPUTS], tl.float32)
    if bias is not None:
        added = tl.load(bias + n, mask=n < O, other=0.0).to(tl.float32)
    for m in tl.static_range(ROWS):
        tl.store(y + m * O + n, (tl.sum(sums[m], 1) + added).to(y.dtype.element_ty), mask=n < O)


@triton.jit(do_not_specialize=["rows", "O"])
def linear_tiles(
    x,  # [rows,I]
    weight,  # [O,I]
    bias,  # [O]
    y,  # [rows,O]
    rows,
    x_row,
    O,
    I: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    m, n = tl.arange(0, ROWS), tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for first in tl.range(0, I, INPUTS):
        k = first + tl.arange(0, INPUTS)
        left = tl.load(x + m[:, None] * x_row + k[None, :], mask=(m < rows)[:, None] & (k < I)[None, :], other=0.0)
        at = n[None, :].to(tl.int64) * I + k[:, None]
        right = tl.load(weight + at, mask=(n < O)[None, :] & (k < I)[:, None], other=0.0)
        sums = tl.dot(left, right, sums)
    if bias is not None:
        sums += tl.load(bias + n, mask=n < O, other=0.0).to(tl.float32)[None, :]
    tl.store(y + m[:, None] * O + n[None, :], sums.to(y.dtype.element_ty), mask=(m < rows)[:, None] & (n < O)[None, :])


def outputs(O: int, device: torch.device) -> int:
    """How many outputs a program computes: fewer where there are few, so that all multiprocessors read."""
    size = OUTPUTS
    while size > 1 and cdiv(O, size) < PROGRAMS * multiprocessors(device):
        size //= 2
    return size


def tile_outputs(O: int, device: torch.device) -> int:
    """How many outputs of a tile: as few as one program for each multiprocessor allows, and at most 64."""
    size = OUTPUTS
    while size < 64 and cdiv(O, size) > multiprocessors(device):
        size *= 2
    return size


def compute(x: Tensor, weight: Tensor, bias: Tensor | None, gate: str) -> tuple[Tensor]:
    """y […,O] of x […,I], or of x […,2·I], the gate and what it multiplies, where `gate` names its activation."""
    O, I = weight.shape
    y = new(x, *x.shape[:-1], O)
    rows = x.numel() // x.shape[-1]
    if rows <= BY_ELEMENTS:
        size = outputs(O, x.device)
        constants = {"ROWS": rows, "GATE": gate, "OUTPUTS": size, "INPUTS": min(INPUTS, next_power_of_2(I))}
        enqueue(linear_rows, (cdiv(O, size),), x, weight, bias, y, x.shape[-1], O, I=I, **constants, num_warps=WARPS)
    else:
        assert gate == "none"
        size, height = tile_outputs(O, x.device), max(16, next_power_of_2(rows))
        launch = {"ROWS": height, "OUTPUTS": size, "INPUTS": TILE_INPUTS, "num_warps": WARPS, "num_stages": STAGES}
        enqueue(linear_tiles, (cdiv(O, size),), x, weight, bias, y, rows, x.shape[-1], O, I=I, **launch)
    return (y,)


def fake(x: Tensor, weight: Tensor, bias: Tensor | None, gate: str) -> tuple[Tensor]:
    """An empty tensor of the shape and dtype that `compute` returns."""
    return (x.new_empty(*x.shape[:-1], weight.shape[0]),)


linear_few = op.register("linear_few", compute, None, fake, results=1)


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, gate: str = "none") -> Tensor:
    """y […,O]; with a gate, x holds its input and what it multiplies side by side."""
    (y,) = linear_few(x.contiguous(), weight.contiguous(), bias, gate)
    return y
