"""The readout in one launch, and the gradients of all arguments in another of the same kernel."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...core.allocation import new
from ...core.autograd import Gradients, register
from ...gpu.launch import cdiv, enqueue, next_power_of_2
from ...gpu.overlap import MOST_EARLY, wait
from ...gpu.rows import head_tile_of, load, rows_of
from .. import Arguments

TILE = 2048  # numbers of a head that a program works on


@triton.jit(do_not_specialize=["rows"])
def read(
    o,
    v,
    own,
    gate,
    y,  # like all below, None in the pass that does not need it
    dy,
    do,
    dv,
    down,
    dgate,
    rows,
    o_row,
    v_row,
    gate_row,
    H: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write y, or the gradients if dy is given, of some tokens of a head."""
    wait(OVERLAP)
    h, first, c = tl.program_id(0) % H, tl.program_id(0) // H * ROWS, tl.arange(0, BLOCK)
    dense, inside = head_tile_of(first, rows, H * V, h, c, V, ROWS)
    in_o, _ = head_tile_of(first, rows, o_row, h, c, V, ROWS)
    in_v, _ = head_tile_of(first, rows, v_row, h, c, V, ROWS)
    r = first + tl.arange(0, ROWS)
    of_head = r.to(tl.int64) * H + h
    value, share = load(v, in_v, inside), load(own, of_head, r < rows)[:, None]
    if gate is not None:
        in_gate, _ = head_tile_of(first, rows, gate_row, h, c, V, ROWS)
        z = load(gate, in_gate, inside)
        opened = tl.sigmoid(z)
    if dy is None:
        result = load(o, in_o, inside) + share * value
        if gate is not None:
            result *= z * opened
        tl.store(y + dense, result.to(y.dtype.element_ty), mask=inside)
    else:
        d = load(dy, dense, inside)
        if gate is not None:
            of_gate = d * (load(o, in_o, inside) + share * value) * opened * (1 + z * (1 - opened))
            tl.store(dgate + dense, of_gate.to(dgate.dtype.element_ty), mask=inside)
            d *= z * opened
        tl.store(do + dense, d.to(do.dtype.element_ty), mask=inside)
        tl.store(dv + dense, (d * share).to(dv.dtype.element_ty), mask=inside)
        tl.store(down + of_head, tl.sum(d * value, 1), mask=r < rows)


def _launch(args: Arguments, *results: Tensor | None) -> None:
    """Launch the kernel with what it reads and writes after the arguments."""
    (H, V), block = args.o.shape[2:], next_power_of_2(args.o.shape[3])
    (o, rows, o_row), (v, _, v_row) = (rows_of(x.flatten(2)) for x in (args.o, args.v))
    gate, _, gate_row = (None, 0, 0) if args.gate is None else rows_of(args.gate.flatten(2))
    tile = {"H": H, "V": V, "ROWS": max(1, TILE // block), "BLOCK": block}
    inputs, strides = (o, v, args.own.contiguous(), gate), (o_row, v_row, gate_row)
    programs = H * cdiv(rows, tile["ROWS"])
    enqueue(read, programs, *inputs, *results, rows, *strides, **tile, overlap=programs <= MOST_EARLY)


def _empty(args: Arguments) -> tuple[Tensor]:
    return (new(args.o),)


def _compute(args: Arguments) -> tuple[Tensor]:
    (y,) = _empty(args)
    _launch(args, y, *[None] * 5)
    return (y,)


def _differentiate(args: Arguments, needed: Any, dy: Tensor) -> Gradients:
    gradients = {name: None if x is None else new(x) for name, x in args._asdict().items()}
    _launch(args, None, dy.contiguous(), *gradients.values())
    return gradients


forward = register("skip_readout", _compute, _differentiate, _empty)
