"""Gates that a few numbers per token are widened into, and their decays, in one launch: raw gates stay in registers.

Forward, the decays are all that is written. Backward, their gradients are all that is read: a program computes the
raw gates of its columns again, tile by tile, and from their gradients its part of those of x, W and the bias.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.allocation import new
from ...core.autograd import Gradients, register
from ...gpu.launch import cdiv, enqueue, next_power_of_2
from ...gpu.reductions import add_outer, add_parts
from ...gpu.rows import load, per_channel, rows_of, tile_of, walkers
from ...gpu.tiles import sigmoid
from ..low_rank import dtype_of
from .op import log_sigmoid

FORWARD = {"ROWS": 64, "BLOCK": 128}
BACKWARD = {"ROWS": 64, "BLOCK": 128}
PROGRAMS = 2  # per multiprocessor in the backward pass


@triton.jit
def load_tile(x, first, rows, stride, c, C: tl.constexpr, ROWS: tl.constexpr):
    at, _, inside = tile_of(first, rows, stride, c, C, ROWS)
    return tl.load(x + at, mask=inside, other=0.0)


@triton.jit(do_not_specialize=["rows"])
def low_rank_forward(
    x,  # [rows,R]
    weight,  # [C,R]
    bias,  # [C]
    log_decay,  # [rows,C]
    rows,
    x_row,
    scale,
    C: tl.constexpr,
    R: tl.constexpr,
    BR: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    BLOCKS: tl.constexpr = (C + BLOCK - 1) // BLOCK
    column, first = tl.program_id(0) % BLOCKS * BLOCK, tl.program_id(0) // BLOCKS * ROWS
    c, r = column + tl.arange(0, BLOCK), tl.arange(0, BR)
    X = load_tile(x, first, rows, x_row, r, R, ROWS)
    W = load_tile(weight, column, C, R, r, R, BLOCK).to(X.dtype)
    wide = tl.dot(X, tl.trans(W), input_precision=PRECISION)
    if bias is not None:
        wide += per_channel(bias, c, C)
    at, _, inside = tile_of(first, rows, C, c, C, ROWS)
    tl.store(log_decay + at, (log_sigmoid(wide) * scale).to(log_decay.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def low_rank_backward(
    x,
    weight,
    bias,
    dy,  # [rows,C]
    x_parts,  # [blocks of columns,rows,R], to be summed over the blocks
    weight_parts,  # [programs per block,R,C], to be summed over the programs
    bias_parts,  # [programs per block,1,C], likewise
    rows,
    x_row,
    scale,
    C: tl.constexpr,
    R: tl.constexpr,
    BR: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    BLOCKS: tl.constexpr = (C + BLOCK - 1) // BLOCK
    block = tl.program_id(0) % BLOCKS
    program, programs = tl.program_id(0) // BLOCKS, tl.num_programs(0) // BLOCKS
    c, r = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BR)
    W = load_tile(weight, block * BLOCK, C, R, r, R, BLOCK).to(x.dtype.element_ty)
    from_weight, from_bias = tl.zeros([BR, BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for first in tl.range(program * ROWS, rows, programs * ROWS, num_stages=3):
        X = load_tile(x, first, rows, x_row, r, R, ROWS)
        at, _, inside = tile_of(first, rows, C, c, C, ROWS)
        wide = tl.dot(X, tl.trans(W), input_precision=PRECISION)
        if bias is not None:
            wide += per_channel(bias, c, C)
        d = load(dy, at, inside) * scale * sigmoid(-wide)
        from_bias += tl.sum(d, 0)
        D = d.to(X.dtype)
        from_weight = tl.dot(tl.trans(X), D, from_weight, input_precision=PRECISION)
        dx = tl.dot(D, W, input_precision=PRECISION)
        into, _, inside = tile_of(first, rows, R, r, R, ROWS)
        tl.store(x_parts + block.to(tl.int64) * rows * R + into, dx, mask=inside)
    mask = (r < R)[:, None] & (c < C)[None, :]
    tl.store(weight_parts + (program * R + r[:, None]) * C + c[None, :], from_weight, mask=mask)
    if bias_parts is not None:
        tl.store(bias_parts + program * C + c, from_bias, mask=c < C)


def _constants(x: Tensor, weight: Tensor) -> dict[str, Any]:
    C, R = weight.shape
    precision = "ieee" if x.dtype == torch.float32 else "tf32"
    return {"C": C, "R": R, "BR": max(16, next_power_of_2(R)), "PRECISION": precision}


class Arguments(NamedTuple):
    x: Tensor  # […,R]
    weight: Tensor  # [C,R]
    bias: Tensor | None  # [C]
    scale: float


def _empty(args: Arguments) -> tuple[Tensor]:
    return (new(args.x, *args.x.shape[:-1], args.weight.shape[0], dtype=dtype_of(args.x)),)


def _compute(args: Arguments) -> tuple[Tensor]:
    (x, weight, bias, scale), (y,) = args, _empty(args)
    x, rows, x_row = rows_of(x)
    programs = cdiv(rows, FORWARD["ROWS"]) * cdiv(weight.shape[0], FORWARD["BLOCK"])
    sizes = {**_constants(x, weight), **FORWARD}
    enqueue(low_rank_forward, programs, x, weight, bias, y, rows, x_row, scale, **sizes, warps=4)
    return (y,)


def _differentiate(args: Arguments, needed: Any, dy: Tensor) -> Gradients:
    x, weight, bias, scale = args
    dx, (C, R) = new(x), weight.shape
    x, rows, x_row = rows_of(x)
    blocks = cdiv(C, BACKWARD["BLOCK"])
    programs = walkers(rows, BACKWARD["ROWS"], x.device, PROGRAMS, blocks)
    of_x, of_weight = (new(x, *shape, dtype=torch.float32) for shape in ((blocks, rows, R), (programs, R, C)))
    of_bias = None if bias is None else new(x, programs, 1, C, dtype=torch.float32)
    tensors = (x, weight, bias, dy.contiguous(), of_x, of_weight, of_bias)
    sizes = {**_constants(x, weight), **BACKWARD}
    enqueue(low_rank_backward, programs * blocks, *tensors, rows, x_row, scale, **sizes, warps=4)
    dx.copy_(add_outer(of_x, dx.dtype).view(dx.shape))
    dbias = None if of_bias is None or bias is None else add_parts(of_bias, bias.dtype).view(C)
    return {"x": dx, "weight": add_parts(of_weight, weight.dtype), "bias": dbias}


low_rank = register("low_rank_forget_gate", _compute, _differentiate, _empty)


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """log_decay […,C] of x […,R]."""
    bias = None if bias is None else bias.contiguous()
    return low_rank(x, weight.contiguous(), bias, scale)
