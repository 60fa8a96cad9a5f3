"""The activation of a gate, alone or times a stream, in Triton: one launch forward and one backward."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...core.allocation import new
from ...core.autograd import Gradients, register
from ...gpu.launch import cdiv, enqueue, next_power_of_2
from ...gpu.overlap import MOST_EARLY, wait
from ...gpu.rows import load, row_stride, rows_of
from ...gpu.tiles import activated

BLOCK, WARPS = 1024, 4


@triton.jit
def places(x_row, gate_row, C: tl.constexpr, BLOCK: tl.constexpr):
    """Offsets of a program's part of a row of x, of the gate and of a dense tensor, and its mask."""
    BLOCKS: tl.constexpr = (C + BLOCK - 1) // BLOCK
    row, c = (tl.program_id(0) // BLOCKS).to(tl.int64), tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    return row * x_row + c, row * gate_row + c, row * C + c, c < C


@triton.jit
def multiply(
    gate, x, y, x_row, gate_row, largest,
    C: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait(OVERLAP)
    at, at_gate, dense, inside = places(x_row, gate_row, C, BLOCK)
    factor, _ = activated(load(gate, at_gate, inside), ACTIVATION)
    factor *= largest
    if x is not None:
        factor *= load(x, at, inside)
    tl.store(y + dense, factor.to(y.dtype.element_ty), mask=inside)


@triton.jit
def differentiate(
    gate,
    x,
    dy,
    y,  # computed again, unless it is None
    dx,
    dgate,
    x_row,
    gate_row,
    largest,
    dx_row,
    dgate_row,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait(OVERLAP)
    at, at_gate, dense, inside = places(x_row, gate_row, C, BLOCK)
    to_x, to_gate, _, _ = places(dx_row, dgate_row, C, BLOCK)
    factor, slope = activated(load(gate, at_gate, inside), ACTIVATION)
    d = largest * load(dy, dense, inside)
    if x is not None:
        value = load(x, at, inside)
        if y is not None:
            tl.store(y + dense, (largest * factor * value).to(y.dtype.element_ty), mask=inside)
        tl.store(dx + to_x, (d * factor).to(dx.dtype.element_ty), mask=inside)
        d *= value
    tl.store(dgate + to_gate, (d * slope).to(dgate.dtype.element_ty), mask=inside)


class Arguments(NamedTuple):
    gate: Tensor  # […,C]
    x: Tensor | None  # […,C]
    activation: str
    largest: float


def _launch(kernel: Any, args: Arguments, *written: Tensor | None, strides: Sequence[int] = ()) -> None:
    (gate, rows, gate_row), C = rows_of(args.gate), args.gate.shape[-1]
    x, _, x_row = (None, 0, 0) if args.x is None else rows_of(args.x)
    block = min(BLOCK, next_power_of_2(C))
    numbers = (x_row, gate_row, args.largest, *strides)
    constants: dict[str, Any] = {"C": C, "BLOCK": block, "ACTIVATION": args.activation, "warps": WARPS}
    programs = rows * cdiv(C, block)
    enqueue(kernel, programs, gate, x, *written, *numbers, **constants, overlap=programs <= MOST_EARLY)


def compute(args: Arguments, y: Tensor) -> None:
    """Write the result to y, which is contiguous."""
    _launch(multiply, args, y)


def compute_gradients(args: Arguments, dy: Tensor, y: Tensor | None, dx: Tensor | None, dgate: Tensor) -> None:
    """Write the gradients for dy to dx and dgate, whose rows may be apart, and the result to y unless it is None."""
    strides = [0 if g is None else row_stride(g) for g in (dx, dgate)]
    _launch(differentiate, args, dy, y, dx, dgate, strides=strides)


def _empty(args: Arguments) -> tuple[Tensor]:
    return (new(args.gate if args.x is None else args.x),)


def _compute(args: Arguments) -> tuple[Tensor]:
    (y,) = _empty(args)
    compute(args, y)
    return (y,)


def _differentiate(args: Arguments, needed: Any, dy: Tensor) -> Gradients:
    dx, dgate = None if args.x is None else new(args.x), new(args.gate)
    compute_gradients(args, dy.contiguous(), None, dx, dgate)
    return {"x": dx, "gate": dgate}


forward = register("activation_gate", _compute, _differentiate, _empty)
