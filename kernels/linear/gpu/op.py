"""Products of few rows with a weight: every program reads some rows of the weight once, for all rows of the input.

One or two rows are multiplied without tensor cores, more of them with these, in tiles that hold all rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"
# ruff: noqa: RUF005

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.allocation import new
from ...core.autograd import register
from ...gpu.device import HOPPER, capability
from ...gpu.launch import cdiv, enqueue, next_power_of_2
from ...gpu.overlap import prefetch, wait
from .. import MOST_ROWS, tiles
from .tiles import INTERPRETED

ROWS = 2  # most rows without tensor cores
INNER, STAGES = 128, 4  # inputs of a tile with tensor cores, and how many of these are on their way
NARROW, WIDE = 16, 64  # outputs of such a tile: with wide ones x is read less often, narrow ones make more programs
FEW_OUTPUTS = 2048  # up to which tiles are narrow
INPUTS, OUTPUTS = 1024, 2  # of a tile of the weight


@triton.jit
def part(x, at, inside, I: tl.constexpr, GATE: tl.constexpr):
    """A part of a row of x, or of the gated product of its two halves."""
    value = tl.load(x + at, mask=inside, other=0.0)
    if GATE != "none":
        gate, up = value.to(tl.float32), tl.load(x + at + I, mask=inside, other=0.0).to(tl.float32)
        if GATE == "silu":
            gate *= tl.sigmoid(gate)
        value = (gate * up).to(value.dtype)  # rounded as on the path for many rows
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
    OVERLAP: tl.constexpr,
):
    first_output = tl.program_id(0) * OUTPUTS
    n = first_output + tl.arange(0, OUTPUTS)
    rows_of_weight = tl.minimum(OUTPUTS, O - first_output)
    prefetch(weight, first_output.to(tl.int64) * I, rows_of_weight * I, OUTPUTS * I, OVERLAP)
    wait(OVERLAP)
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


@triton.jit(do_not_specialize=["M", "O"])
def linear_tile(
    x,  # [M,I]
    weight,  # [O,I]
    bias,  # [O]
    y,  # [M,O]
    M,
    O,
    I: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INNER: tl.constexpr,
    DTYPE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    first = tl.program_id(0) * OUTPUTS
    prefetch(weight, first.to(tl.int64) * I, tl.minimum(OUTPUTS, O - first) * I, OUTPUTS * I, OVERLAP)
    wait(OVERLAP)
    m, n, k = tl.arange(0, ROWS)[:, None], first + tl.arange(0, OUTPUTS), tl.arange(0, INNER)
    of_x, of_weight = x + m * I + k[None, :], weight + n[None, :].to(tl.int64) * I + k[:, None]
    sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in tl.range(0, I, INNER):
        inside = start + k < I
        left = tl.load(of_x + start, mask=(m < M) & inside[None, :], other=0.0).to(DTYPE)
        right = tl.load(of_weight + start, mask=inside[:, None] & (n < O)[None, :], other=0.0).to(DTYPE)
        sums = tl.dot(left, right, sums, input_precision="ieee")
    if bias is not None:
        sums += tl.load(bias + n, mask=n < O, other=0.0).to(tl.float32)[None, :]
    tl.store(y + m.to(tl.int64) * O + n[None, :], sums.to(y.dtype.element_ty), mask=(m < M) & (n < O)[None, :])


class Arguments(NamedTuple):
    x: Tensor  # […,I], or […,2·I]: the gate and what it multiplies
    weight: Tensor  # [O,I]
    bias: Tensor | None  # [O]
    gate: str  # activation of the gate, or none; of at most `ROWS` rows


def _empty(args: Arguments) -> tuple[Tensor]:
    return (new(args.x, *args.x.shape[:-1], args.weight.shape[0]),)


def _compute(args: Arguments) -> tuple[Tensor]:
    x, weight, bias, gate = args
    (O, I), (y,), rows = weight.shape, _empty(args), x.numel() // x.shape[-1]
    if rows > ROWS:
        columns = NARROW if O <= FEW_OUTPUTS else WIDE
        # the interpreter gets bf16 arithmetic wrong
        dtype = tl.float32 if INTERPRETED else tl.bfloat16 if x.dtype == torch.bfloat16 else tl.float16
        constants = {"I": I, "ROWS": MOST_ROWS, "OUTPUTS": columns, "INNER": INNER, "DTYPE": dtype}
        tensors = (x, weight, bias, y)
        enqueue(linear_tile, cdiv(O, columns), *tensors, rows, O, **constants, stages=STAGES, overlap=True)
        return (y,)
    sizes = {"ROWS": rows, "OUTPUTS": OUTPUTS, "INPUTS": min(INPUTS, next_power_of_2(I))}
    warps = 4 if I <= INPUTS else 8
    programs = cdiv(O, OUTPUTS)
    enqueue(
        linear_rows, programs, x, weight, bias, y, x.shape[-1], O, I=I, GATE=gate, **sizes, warps=warps, overlap=True
    )
    return (y,)


linear_few = register("linear_few", _compute, None, _empty)


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, gate: str = "none") -> Tensor:
    """y […,O]; with a gate, x holds its input and what it multiplies side by side, of at most `ROWS` rows."""
    if x.numel() > ROWS * x.shape[-1] and capability(x.device) != HOPPER:
        return tiles.linear(x, weight, bias)
    return linear_few(x.contiguous(), weight.contiguous(), bias, gate)
