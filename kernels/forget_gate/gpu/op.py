"""The decays of gates in one launch, and their gradients in another: each reads and writes the stream once."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.allocation import new
from ...core.autograd import Gradients, register
from ...gpu.launch import cdiv, enqueue, next_power_of_2
from ...gpu.reductions import add_parts
from ...gpu.rows import per_channel, rows_of, shifted, tile_of, walkers
from ...gpu.tiles import log1p_exp
from ..composition import Arguments, empty

ELEMENTS, WIDEST = 2048, 512  # of a tile, and most of them in a row
PROGRAMS = 16  # per multiprocessor in the backward pass; each stores its part of the gradients of bias and odds


@triton.jit
def log_sigmoid(x):
    return tl.minimum(x, 0.0) - log1p_exp(x)


@triton.jit
def log_forget(x, odds, c, C: tl.constexpr):
    """log(σ(odds) + σ(−odds) σ(x))."""
    log_gate = log_sigmoid(x)
    if odds is not None:
        at = per_channel(odds, c, C)
        low, high = log_sigmoid(at), log_sigmoid(-at) + log_gate
        log_gate = tl.maximum(low, high) + log1p_exp(low - high)
    return log_gate


@triton.jit(do_not_specialize=["rows"])
def forget_forward(
    x, bias, odds, log_decay, rows, x_row, scale, C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    BLOCKS: tl.constexpr = (C + BLOCK - 1) // BLOCK
    c = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    at, dense, inside = tile_of(tl.program_id(0) // BLOCKS * ROWS, rows, x_row, c, C, ROWS)
    tl.store(log_decay + dense, log_forget(shifted(x, bias, at, inside, c, C), odds, c, C) * scale, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def forget_backward(
    x,
    bias,
    odds,
    dy,
    dx,
    parts,  # [programs per column,C,2]: gradients of bias and odds, to be summed over the programs
    rows,
    x_row,
    scale,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    BLOCKS: tl.constexpr = (C + BLOCK - 1) // BLOCK
    c = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    program, programs = tl.program_id(0) // BLOCKS, tl.num_programs(0) // BLOCKS
    from_bias, from_odds = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
    for first in tl.range(program * ROWS, rows, programs * ROWS):
        at, dense, inside = tile_of(first, rows, x_row, c, C, ROWS)
        wide = shifted(x, bias, at, inside, c, C)
        d = tl.load(dy + dense, mask=inside, other=0.0) * scale
        if odds is None:
            dwide = d * tl.sigmoid(-wide)
        else:
            o = per_channel(odds, c, C)
            shut = log_sigmoid(-wide) - log_forget(wide, odds, c, C) + log_sigmoid(-o)
            dwide = d * tl.exp(shut + log_sigmoid(wide))
            from_odds += d * tl.exp(shut + log_sigmoid(o))
        from_bias += dwide
        tl.store(dx + dense, dwide.to(dx.dtype.element_ty), mask=inside)
    if parts is not None:
        at = parts + (program * C + c) * 2
        tl.store(at, tl.sum(from_bias, 0), mask=c < C)
        tl.store(at + 1, tl.sum(from_odds, 0), mask=c < C)


def _tile(size: int) -> dict[str, int]:
    block = min(next_power_of_2(size), WIDEST)
    return {"C": size, "ROWS": ELEMENTS // block, "BLOCK": block}


def _compute(args: Arguments) -> tuple[Tensor]:
    x, bias, odds, scale = args
    y, sizes = new(x, dtype=torch.float32), _tile(x.shape[-1])
    x, rows, x_row = rows_of(x)
    programs = cdiv(rows, sizes["ROWS"]) * cdiv(sizes["C"], sizes["BLOCK"])
    enqueue(forget_forward, programs, x, bias, odds, y, rows, x_row, scale, **sizes)
    return (y,)


def _differentiate(args: Arguments, needed: Any, dy: Tensor) -> Gradients:
    x, bias, odds, scale = args
    dx, sizes = new(x), _tile(x.shape[-1])
    x, rows, x_row = rows_of(x)
    blocks = cdiv(sizes["C"], sizes["BLOCK"])
    programs = walkers(rows, sizes["ROWS"], x.device, PROGRAMS, blocks)
    parts = dbias = dodds = None
    if bias is not None or odds is not None:
        parts = new(x, programs, sizes["C"], 2, dtype=torch.float32)
    tensors = (x, bias, odds, dy.contiguous(), dx, parts)
    enqueue(forget_backward, programs * blocks, *tensors, rows, x_row, scale, **sizes)
    if parts is not None:
        both = add_parts(parts, torch.float32)
        dbias = None if bias is None else both[0].to(bias.dtype)
        dodds = None if odds is None else both[1].to(odds.dtype)
    return {"x": dx, "bias": dbias, "odds": dodds}


forget_gate = register("forget_gate_triton", _compute, _differentiate, empty)


def forward(x: Tensor, bias: Tensor | None, odds: Tensor | None, scale: float) -> Tensor:
    """log_decay, in the shape of x […,C]."""
    bias, odds = (None if parameter is None else parameter.contiguous() for parameter in (bias, odds))
    return forget_gate(x, bias, odds, scale)
