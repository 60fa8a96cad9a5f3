"""Decays of gates, and input gates tied to them, in one launch, and their gradients in another.

Each reads and writes the stream once.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.allocation import new
from ...core.autograd import Gradients, register
from ...core.recompute import remake
from ...gpu.launch import cdiv, enqueue, next_power_of_2
from ...gpu.overlap import MOST_EARLY, wait
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
def log_forget_of(log_gate, odds):
    """log(σ(odds) + σ(−odds) exp(log_gate))."""
    low, high = log_sigmoid(odds), log_sigmoid(-odds) + log_gate
    return tl.maximum(low, high) + log1p_exp(low - high)


@triton.jit
def odds_of(bounds, at, inside, layer, ROWS: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr):
    """The log odds of the lower bounds of some channels, as `lower_bound_odds` computes them."""
    rows = tl.arange(0, BLOCK)[None, :]
    x = tl.load(bounds + rows * C + at[:, None], mask=inside[:, None] & (rows < ROWS), other=float("-inf"))
    x = tl.where(inside[:, None] | (rows > 0), x.to(tl.float32), 0.0)
    most = tl.max(x, 1)
    e = tl.exp(x - most[:, None])
    below = (rows > 0) & (rows <= layer)
    return tl.log(tl.sum(tl.where(below, e, 0.0), 1)) - tl.log(tl.sum(tl.where(below, 0.0, e), 1))


@triton.jit(do_not_specialize=["layer"])
def store_odds(
    bounds, odds, layer,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait(OVERLAP)
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(odds + c, odds_of(bounds, c, c < C, layer, ROWS, BLOCK, C), mask=c < C)


@triton.jit
def log_forget(x, odds, c, C: tl.constexpr):
    """log(σ(odds) + σ(−odds) σ(x))."""
    log_gate = log_sigmoid(x)
    if odds is not None:
        log_gate = log_forget_of(log_gate, per_channel(odds, c, C))
    return log_gate


@triton.jit
def complement(g):
    """1 − exp(g) of g ≤ 0; where g is close to 0, by the Taylor series, whose next term is below 1e-8."""
    p = 1.0 + g * (1.0 / 8.0)
    for i in tl.static_range(6):
        p = 1.0 + g * (1.0 / (7.0 - i)) * p
    return tl.where(g > -0.5, -g * p, 1.0 - tl.exp(g))


@triton.jit(do_not_specialize=["rows"])
def forget_forward(
    x,
    bias,
    odds,
    log_decay,
    written,  # 1 − exp(log_decay); either result is None where it is not needed
    rows,
    x_row,
    scale,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait(OVERLAP)
    BLOCKS: tl.constexpr = (C + BLOCK - 1) // BLOCK
    c = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    at, dense, inside = tile_of(tl.program_id(0) // BLOCKS * ROWS, rows, x_row, c, C, ROWS)
    g = log_forget(shifted(x, bias, at, inside, c, C), odds, c, C) * scale
    if log_decay is not None:
        tl.store(log_decay + dense, g, mask=inside)
    if written is not None:
        tl.store(written + dense, complement(g).to(written.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def forget_backward(
    x,
    bias,
    odds,
    dy,  # of log_decay, or None
    dwritten,  # or None
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
        d = tl.zeros([ROWS, BLOCK], tl.float32)
        if dy is not None:
            d = tl.load(dy + dense, mask=inside, other=0.0)
        if dwritten is not None:
            g = log_forget(wide, odds, c, C) * scale
            d -= tl.load(dwritten + dense, mask=inside, other=0.0).to(tl.float32) * tl.exp(g)
        d *= scale
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


def _launch(x: Tensor, bias: Tensor | None, odds: Tensor | None, scale: float, *results: Tensor | None) -> None:
    """Fill log decays and input gates, each unless it is None."""
    sizes = _tile(x.shape[-1])
    x, rows, x_row = rows_of(x)
    programs = cdiv(rows, sizes["ROWS"]) * cdiv(sizes["C"], sizes["BLOCK"])
    overlap = programs <= MOST_EARLY
    enqueue(forget_forward, programs, x, bias, odds, *results, rows, x_row, scale, **sizes, overlap=overlap)


def _gradients(
    x: Tensor, bias: Tensor | None, odds: Tensor | None, scale: float, dy: Tensor | None, dwritten: Tensor | None
) -> Gradients:
    dx, sizes = new(x), _tile(x.shape[-1])
    x, rows, x_row = rows_of(x)
    blocks = cdiv(sizes["C"], sizes["BLOCK"])
    programs = walkers(rows, sizes["ROWS"], x.device, PROGRAMS, blocks)
    parts = dbias = dodds = None
    if bias is not None or odds is not None:
        parts = new(x, programs, sizes["C"], 2, dtype=torch.float32)
    arriving = (None if d is None else d.contiguous() for d in (dy, dwritten))
    enqueue(forget_backward, programs * blocks, x, bias, odds, *arriving, dx, parts, rows, x_row, scale, **sizes)
    if parts is not None:
        both = add_parts(parts, torch.float32)
        dbias = None if bias is None else both[0].to(bias.dtype)
        dodds = None if odds is None else both[1].to(odds.dtype)
    return {"x": dx, "bias": dbias, "odds": dodds}


def _compute(args: Arguments) -> tuple[Tensor]:
    (y,) = empty(args)
    _launch(*args, y, None)
    return (y,)


def _differentiate(args: Arguments, needed: Any, dy: Tensor) -> Gradients:
    return _gradients(*args, dy, None)


forget_gate = register("forget_gate_triton", _compute, _differentiate, empty)


class Tied(NamedTuple):
    """Arguments of `Arguments`, and the dtype of the input gates."""

    x: Tensor
    bias: Tensor | None
    odds: Tensor | None
    scale: float
    dtype: torch.dtype


def _empty_tied(args: Tied) -> tuple[Tensor, Tensor]:
    return *empty(Arguments(*args[:4])), new(args.x, dtype=args.dtype)


def _compute_tied(args: Tied) -> tuple[Tensor, Tensor]:
    results = _empty_tied(args)
    _launch(*args[:4], *results)
    return results


def _differentiate_tied(args: Tied, needed: Any, dy: Tensor | None, dwritten: Tensor | None) -> Gradients:
    return _gradients(*args[:4], dy, dwritten)


tied_gates = register("tied_gates_triton", _compute_tied, _differentiate_tied, _empty_tied, results=2)


def _written(x: Tensor, bias: Tensor | None, odds: Tensor | None, scale: float, dtype: torch.dtype) -> Tensor:
    """The input gates alone, computed again."""
    written = new(x, dtype=dtype)
    _launch(x, bias, odds, scale, None, written)
    return written


def odds_at(bounds: Tensor, layer: int) -> Tensor:
    """The result of `lower_bound_odds` in one launch, without a gradient."""
    (L, C), odds = bounds.shape, new(bounds, bounds.shape[1], dtype=torch.float32)
    columns = max(1, min(next_power_of_2(C), ELEMENTS // next_power_of_2(L)))
    sizes = {"ROWS": L, "BLOCK": next_power_of_2(L), "C": C, "COLUMNS": columns}
    programs = cdiv(C, columns)
    enqueue(store_odds, programs, bounds.contiguous(), odds, layer, **sizes, overlap=programs <= MOST_EARLY)
    return odds


def forward(x: Tensor, bias: Tensor | None, odds: Tensor | None, scale: float) -> Tensor:
    """log_decay, in the shape of x […,C]."""
    bias, odds = (None if parameter is None else parameter.contiguous() for parameter in (bias, odds))
    return forget_gate(x, bias, odds, scale)


def tied(
    x: Tensor, bias: Tensor | None, odds: Tensor | None, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """log_decay and 1 − exp(log_decay); inside `recomputing()`, later operations do not save them."""
    bias, odds = (None if parameter is None else parameter.contiguous() for parameter in (bias, odds))
    log_decay, written = tied_gates(x, bias, odds, scale, dtype)
    args = x, bias, odds, scale
    return remake(log_decay, forget_gate, *args), remake(written, _written, *args, dtype)
