"""Products of one or two rows with a weight: every program reads some of its rows once, for all rows of the input."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"
# ruff: noqa: RUF005

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...core.allocation import new
from ...core.autograd import register
from ...gpu.launch import cdiv, enqueue, next_power_of_2
from ...gpu.overlap import prefetch, wait

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


class Arguments(NamedTuple):
    x: Tensor  # […,I], or […,2·I]: the gate and what it multiplies
    weight: Tensor  # [O,I]
    bias: Tensor | None  # [O]
    gate: str  # activation of the gate, or none


def _empty(args: Arguments) -> tuple[Tensor]:
    return (new(args.x, *args.x.shape[:-1], args.weight.shape[0]),)


def _compute(args: Arguments) -> tuple[Tensor]:
    x, weight, bias, gate = args
    (O, I), (y,) = weight.shape, _empty(args)
    sizes = {"ROWS": x.numel() // x.shape[-1], "OUTPUTS": OUTPUTS, "INPUTS": min(INPUTS, next_power_of_2(I))}
    warps = 4 if I <= INPUTS else 8
    programs = cdiv(O, OUTPUTS)
    enqueue(linear_rows, programs, x, weight, bias, y, x.shape[-1], O, I=I, GATE=gate, **sizes, warps=warps, overlap=True)
    return (y,)


linear_few = register("linear_few", _compute, None, _empty)


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, gate: str = "none") -> Tensor:
    """y […,O]; with a gate, x holds its input and what it multiplies side by side."""
    return linear_few(x.contiguous(), weight.contiguous(), bias, gate)
