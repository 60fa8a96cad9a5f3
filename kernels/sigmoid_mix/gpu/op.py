"""The mixture in one launch, and the gradients of all arguments in another, which saves the arguments alone."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.allocation import new
from ...core.autograd import Gradients, register
from ...gpu.launch import cdiv, enqueue, next_power_of_2
from ...gpu.reductions import add_parts
from ...gpu.rows import load, rows_of, shifted, tile_of, walkers
from ...gpu.tiles import sigmoid

ROWS, COLUMNS, WARPS = 4, 256, 4
PROGRAMS = 6  # per multiprocessor in the backward pass; each stores its part of the gradient of the bias


@triton.jit(do_not_specialize=["rows"])
def mix(
    x,
    other,
    gate,
    bias,
    y,
    rows,
    x_row,
    other_row,
    gate_row,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    BLOCKS: tl.constexpr = (C + COLUMNS - 1) // COLUMNS
    first, c = tl.program_id(0) // BLOCKS * ROWS, tl.program_id(0) % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    at, dense, inside = tile_of(first, rows, x_row, c, C, ROWS)
    in_other, _, _ = tile_of(first, rows, other_row, c, C, ROWS)
    in_gate, _, _ = tile_of(first, rows, gate_row, c, C, ROWS)
    u, share = load(x, at, inside), sigmoid(shifted(gate, bias, in_gate, inside, c, C))
    tl.store(y + dense, (u + (load(other, in_other, inside) - u) * share).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def differentiate(
    x,
    other,
    gate,
    bias,
    dy,
    dx,
    dother,
    dgate,
    parts,  # [programs / BLOCKS,C]: gradients of the bias, to be summed
    rows,
    x_row,
    other_row,
    gate_row,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    BLOCKS: tl.constexpr = (C + COLUMNS - 1) // COLUMNS
    walker, c = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    biases = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in tl.range(walker * ROWS, rows, tl.num_programs(0) // BLOCKS * ROWS):
        at, dense, inside = tile_of(first, rows, x_row, c, C, ROWS)
        in_other, _, _ = tile_of(first, rows, other_row, c, C, ROWS)
        in_gate, _, _ = tile_of(first, rows, gate_row, c, C, ROWS)
        share, d = sigmoid(shifted(gate, bias, in_gate, inside, c, C)), load(dy, dense, inside)
        dshare = d * (load(other, in_other, inside) - load(x, at, inside)) * share * (1 - share)
        tl.store(dx + dense, (d * (1 - share)).to(dx.dtype.element_ty), mask=inside)
        tl.store(dother + dense, (d * share).to(dother.dtype.element_ty), mask=inside)
        tl.store(dgate + dense, dshare.to(dgate.dtype.element_ty), mask=inside)
        biases += dshare
    tl.store(parts + walker * C + c, tl.sum(biases, 0), mask=c < C)


class Arguments(NamedTuple):
    x: Tensor  # […,C], like other and gate
    other: Tensor
    gate: Tensor
    bias: Tensor  # [C]


def strided(args: Arguments) -> tuple[tuple[Tensor, ...], tuple[int, ...], dict[str, int]]:
    """The tensors that kernels read, the number of rows and the strides of the tensors, and the constants."""
    tensors, counts, strides = zip(*(rows_of(x) for x in args[:3]), strict=True)
    C = args.bias.numel()
    constants = {"C": C, "ROWS": ROWS, "COLUMNS": min(COLUMNS, next_power_of_2(C)), "warps": WARPS}
    return (*tensors, args.bias.contiguous()), (counts[0], *strides), constants


def _empty(args: Arguments) -> tuple[Tensor]:
    return (new(args.x),)


def _compute(args: Arguments) -> tuple[Tensor]:
    (y,), (tensors, numbers, sizes) = _empty(args), strided(args)
    programs = cdiv(numbers[0], ROWS) * cdiv(sizes["C"], sizes["COLUMNS"])
    enqueue(mix, programs, *tensors, y, *numbers, **sizes)
    return (y,)


def _differentiate(args: Arguments, needed: Any, dy: Tensor) -> Gradients:
    tensors, numbers, sizes = strided(args)
    streams = {name: new(getattr(args, name)) for name in ("x", "other", "gate")}
    blocks = cdiv(sizes["C"], sizes["COLUMNS"])
    count = walkers(numbers[0], ROWS, dy.device, PROGRAMS, blocks)
    parts = new(dy, count, 1, sizes["C"], dtype=torch.float32)
    enqueue(differentiate, count * blocks, *tensors, dy.contiguous(), *streams.values(), parts, *numbers, **sizes)
    return {**streams, "bias": add_parts(parts, args.bias.dtype).view(args.bias.shape)}


forward = register("sigmoid_mix", _compute, _differentiate, _empty)
