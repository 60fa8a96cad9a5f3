"""Preconditioned keys in one launch, and their gradients in another: each reads and writes the streams once."""

# mypy: allow-untyped-defs, allow-incomplete-defs

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.allocation import new
from ...core.autograd import Gradients, register
from ...gpu.launch import cdiv, enqueue, next_power_of_2
from ...gpu.reductions import add_parts
from ...gpu.rows import load, per_channel, rows_of, tile_of, walkers
from ..composition import EPS as LEAST
from ..composition import Arguments, empty

EPS: tl.constexpr = tl.constexpr(LEAST)
ELEMENTS, WIDEST = 2048, 512  # of a tile, and most of them in a row
PROGRAMS = 16  # per multiprocessor in the backward pass; each stores its part of the gradient of centre


@triton.jit(do_not_specialize=["rows"])
def precondition_forward(
    k, curvature, centre, y, rows, k_row, A_row, rate, C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    BLOCKS: tl.constexpr = (C + BLOCK - 1) // BLOCK
    c, first = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK), tl.program_id(0) // BLOCKS * ROWS
    at, dense, inside = tile_of(first, rows, k_row, c, C, ROWS)
    A_at, _, _ = tile_of(first, rows, A_row, c, C, ROWS)
    r = tl.log(load(curvature, A_at, inside) + EPS) - per_channel(centre, c, C)
    factor = tl.exp(rate * r / (1 + tl.abs(r)))
    tl.store(y + dense, (load(k, at, inside) * factor).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def precondition_backward(
    k,
    curvature,
    centre,
    dy,  # [rows,C]
    dk,  # [rows,C]
    dA,  # [rows,C]
    parts,  # [programs per column,C,1]: gradient of centre, to be summed over the programs
    rows,
    k_row,
    A_row,
    rate,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    BLOCKS: tl.constexpr = (C + BLOCK - 1) // BLOCK
    c = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    program, programs = tl.program_id(0) // BLOCKS, tl.num_programs(0) // BLOCKS
    from_centre = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in tl.range(program * ROWS, rows, programs * ROWS):
        at, dense, inside = tile_of(first, rows, k_row, c, C, ROWS)
        A_at, _, _ = tile_of(first, rows, A_row, c, C, ROWS)
        A = load(curvature, A_at, inside) + EPS
        r = tl.log(A) - per_channel(centre, c, C)
        shrunk = 1 / (1 + tl.abs(r))
        d = load(dy, dense, inside) * tl.exp(rate * r * shrunk)
        tl.store(dk + dense, d.to(dk.dtype.element_ty), mask=inside)
        dr = d * load(k, at, inside) * rate * shrunk * shrunk
        tl.store(dA + dense, (dr / A).to(dA.dtype.element_ty), mask=inside)
        from_centre -= dr
    tl.store(parts + program * C + c, tl.sum(from_centre, 0), mask=c < C)


def _tile(size: int) -> dict[str, int]:
    block = min(next_power_of_2(size), WIDEST)
    return {"C": size, "ROWS": ELEMENTS // block, "BLOCK": block}


def _compute(args: Arguments) -> tuple[Tensor]:
    k, curvature, centre, limit = args
    (y,), sizes = empty(args), _tile(k.shape[-1])
    (k, rows, k_row), (curvature, _, A_row) = rows_of(k), rows_of(curvature)
    programs = cdiv(rows, sizes["ROWS"]) * cdiv(sizes["C"], sizes["BLOCK"])
    numbers = rows, k_row, A_row, -math.log(limit)
    enqueue(precondition_forward, programs, k, curvature, centre, y, *numbers, **sizes)
    return (y,)


def _differentiate(args: Arguments, needed: Any, dy: Tensor) -> Gradients:
    k, curvature, centre, limit = args
    dk, dA, sizes = new(k), new(curvature), _tile(k.shape[-1])
    (k, rows, k_row), (curvature, _, A_row) = rows_of(k), rows_of(curvature)
    blocks = cdiv(sizes["C"], sizes["BLOCK"])
    programs = walkers(rows, sizes["ROWS"], k.device, PROGRAMS, blocks)
    parts = new(k, programs, sizes["C"], 1, dtype=torch.float32)
    tensors, numbers = (k, curvature, centre, dy.contiguous(), dk, dA, parts), (rows, k_row, A_row, -math.log(limit))
    enqueue(precondition_backward, programs * blocks, *tensors, *numbers, **sizes)
    return {"k": dk, "curvature": dA, "centre": add_parts(parts, centre.dtype)[0]}


apply = register("precondition_triton", _compute, _differentiate, empty)


def forward(k: Tensor, curvature: Tensor, centre: Tensor, limit: float) -> Tensor:
    """k ⊙ M in the shape of k […,C]."""
    return apply(k, curvature, centre.contiguous(), limit)[0]
