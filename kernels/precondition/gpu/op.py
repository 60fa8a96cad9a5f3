"""Preconditioned keys in one launch, and their gradients in another: each reads and writes the streams once.

A row is one head of one token.
"""

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
from ...gpu.rows import load, tile_of, walkers
from ..composition import EPS as LEAST
from ..composition import Arguments, empty

EPS: tl.constexpr = tl.constexpr(LEAST)
ELEMENTS = 2048  # of a tile
PROGRAMS = 16  # per multiprocessor in the backward pass; each stores its part of the gradient of centre


@triton.jit
def deviation(curvature, centre, at, inside, row, HEADS: tl.constexpr):
    """A + 1e-6, and r = log(A + 1e-6) − centre."""
    A = load(curvature, at, inside) + EPS
    return A, tl.log(A) - tl.load(centre + row % HEADS).to(tl.float32)[:, None]


@triton.jit(do_not_specialize=["rows"])
def precondition_forward(
    k,  # [rows,C]
    curvature,  # [rows,C]
    beta,  # [rows]
    centre,  # [HEADS]
    y,  # [rows,C]
    rows,
    rate,
    HEADS: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first, c = tl.program_id(0).to(tl.int64) * ROWS, tl.arange(0, BLOCK)
    row = first + tl.arange(0, ROWS)
    _, at, inside = tile_of(first, rows, C, c, C, ROWS)
    _, r = deviation(curvature, centre, at, inside, row, HEADS)
    strength = load(beta, row, row < rows)[:, None]
    written = strength * load(k, at, inside) * tl.exp(rate * r / (1 + tl.abs(r)))
    tl.store(y + at, written.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def precondition_backward(
    k,
    curvature,
    beta,
    centre,
    dy,  # [rows,C]
    dk,  # [rows,C]
    dA,  # [rows,C]
    dbeta,  # [rows]
    parts,  # [programs·ROWS]: gradient of centre, to be summed over the rows of a head
    rows,
    rate,
    HEADS: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start, step = tl.program_id(0).to(tl.int64) * ROWS, tl.num_programs(0).to(tl.int64) * ROWS
    i, c, from_centre = tl.arange(0, ROWS), tl.arange(0, BLOCK), tl.zeros([ROWS], tl.float32)
    for first in tl.range(start, rows, step):  # a multiple of HEADS apart, so that i has one head
        row = first + i
        _, at, inside = tile_of(first, rows, C, c, C, ROWS)
        A, r = deviation(curvature, centre, at, inside, row, HEADS)
        shrunk = 1 / (1 + tl.abs(r))
        key, strength = load(k, at, inside), load(beta, row, row < rows)
        d = load(dy, at, inside) * tl.exp(rate * r * shrunk)
        by_row = tl.sum(d * key, 1)
        tl.store(dbeta + row, by_row.to(dbeta.dtype.element_ty), mask=row < rows)
        d *= strength[:, None]
        tl.store(dk + at, d.to(dk.dtype.element_ty), mask=inside)
        dr = d * key * rate * shrunk * shrunk
        tl.store(dA + at, (dr / A).to(dA.dtype.element_ty), mask=inside)
        from_centre -= tl.sum(dr, 1)
    tl.store(parts + start + i, from_centre)


def _tile(k: Tensor) -> dict[str, int]:
    block = next_power_of_2(k.shape[3])
    return {"HEADS": k.shape[2], "C": k.shape[3], "ROWS": max(1, ELEMENTS // block), "BLOCK": block}


def _compute(args: Arguments) -> tuple[Tensor]:
    (y,), sizes, rows = empty(args), _tile(args.k), args.beta.numel()
    tensors = [x.contiguous() for x in args[:4]]
    enqueue(precondition_forward, cdiv(rows, sizes["ROWS"]), *tensors, y, rows, -math.log(args.limit), **sizes)
    return (y,)


def _differentiate(args: Arguments, needed: Any, dy: Tensor) -> Gradients:
    sizes, rows, heads = _tile(args.k), args.beta.numel(), args.k.shape[2]
    dk, dA, dbeta = (new(x) for x in args[:3])
    programs, unit = walkers(rows, sizes["ROWS"], dy.device, PROGRAMS), heads // math.gcd(heads, sizes["ROWS"])
    programs = cdiv(programs, unit) * unit
    parts = new(dy, programs * sizes["ROWS"] // heads, 1, heads, dtype=torch.float32)
    tensors = (*(x.contiguous() for x in (*args[:4], dy)), dk, dA, dbeta, parts)
    enqueue(precondition_backward, programs, *tensors, rows, -math.log(args.limit), **sizes)
    dcentre = add_parts(parts, args.centre.dtype).view(heads)
    return {"k": dk, "curvature": dA, "beta": dbeta, "centre": dcentre}


forward = register("precondition_triton", _compute, _differentiate, empty)
