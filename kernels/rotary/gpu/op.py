"""Rotary positions in one launch; the backward pass is the same kernel, which turns the other way."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...core.autograd import Gradients, register
from ...gpu.launch import cdiv, enqueue, next_power_of_2
from ...gpu.overlap import MOST_EARLY, wait
from ...gpu.rows import load
from .. import Arguments, Turned, empty, gradients, read_by_no_gradient

TILE = 1024  # pairs of a program


@triton.jit
def turn_heads(
    x, positions, rates, y, row, block, T, x_batch, x_row, x_head, position_row, amplitude, sign,
    H: tl.constexpr, D: tl.constexpr, P: tl.constexpr, LAST: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Turn the heads [block · HEADS, (block + 1) · HEADS) of a row of x."""
    FIRST: tl.constexpr = D - 2 * P if LAST else 0  # channel that turns
    h, p = (block * HEADS + tl.arange(0, HEADS))[:, None], tl.arange(0, PAIRS)[None, :]
    b, t = row // T, row % T
    source = x + b.to(tl.int64) * x_batch + t.to(tl.int64) * x_row + h * x_head
    target = y + (row.to(tl.int64) * H + h) * D
    inside = (h < H) & (p < P)
    position = tl.load(positions + b * position_row + t).to(tl.float32)
    angle = position * load(rates, p, p < P)
    cos, sin = tl.cos(angle) * amplitude, tl.sin(angle) * (amplitude * sign)
    a, b = load(source, FIRST + p, inside), load(source, FIRST + P + p, inside)
    tl.store(target + FIRST + p, (a * cos - b * sin).to(y.dtype.element_ty), mask=inside)
    tl.store(target + FIRST + P + p, (a * sin + b * cos).to(y.dtype.element_ty), mask=inside)
    if D > 2 * P:
        r = tl.arange(0, triton.next_power_of_2(D - 2 * P))[None, :]
        c, inside = r if LAST else 2 * P + r, (h < H) & (r < D - 2 * P)
        tl.store(target + c, tl.load(source + c, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["T", "position_row"])
def turn(
    x, other,  # [B,T,H,D] and [B,T,H2,D2] or None, with any strides of rows and heads
    positions,  # [B or 1,T]
    rates,  # [P]
    y, z,  # [B,T,H,D] and [B,T,H2,D2]
    T,
    x_batch, x_row, x_head, other_batch, other_row, other_head,
    position_row,  # 0 if all rows have the same positions
    amplitude, sign,
    H: tl.constexpr, D: tl.constexpr, H2: tl.constexpr, D2: tl.constexpr,
    P: tl.constexpr,
    LAST: tl.constexpr,  # whether the last channels turn
    HEADS: tl.constexpr,  # of a program
    PAIRS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    wait(OVERLAP)
    FIRST: tl.constexpr = (H + HEADS - 1) // HEADS  # programs of a row of x
    BLOCKS: tl.constexpr = FIRST + (H2 + HEADS - 1) // HEADS
    row, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    if other is None or block < FIRST:
        turn_heads(
            x, positions, rates, y, row, block, T, x_batch, x_row, x_head, position_row, amplitude, sign,
            H, D, P, LAST, HEADS, PAIRS,
        )  # fmt: skip
    else:
        turn_heads(
            other, positions, rates, z, row, block - FIRST, T, other_batch, other_row, other_head, position_row,
            amplitude, sign, H2, D2, P, LAST, HEADS, PAIRS,
        )  # fmt: skip


def _launch(args: Arguments, sign: float) -> Turned:
    (y, z), P = empty(args), len(args.rates)
    (x, *others) = (x if x.stride(-1) == 1 else x.contiguous() for x in args.tensors)
    other = others[0] if others else None
    (B, T, H, D), (H2, D2) = x.shape, (0, 0) if other is None else other.shape[2:]
    pairs = next_power_of_2(P)
    heads = max(1, min(next_power_of_2(max(H, H2)), TILE // pairs))
    positions = args.positions.contiguous()
    tensors = (x, other, positions, args.rates.contiguous(), y, z)
    strides = (*x.stride()[:3], *((0, 0, 0) if other is None else other.stride()[:3]))
    numbers = (T, *strides, 0 if len(positions) == 1 else T, args.amplitude, sign)
    sizes = {"H": H, "D": D, "H2": H2, "D2": D2, "P": P, "LAST": args.last, "HEADS": heads, "PAIRS": pairs}
    programs = B * T * (cdiv(H, heads) + cdiv(H2, heads))
    enqueue(turn, programs, *tensors, *numbers, **sizes, overlap=programs <= MOST_EARLY)
    return Turned(y, z)


def _compute(args: Arguments) -> Turned:
    return _launch(args, 1.0)


def _differentiate(args: Arguments, needed: Any, dx: Tensor | None, dother: Tensor | None) -> Gradients:
    return gradients(_launch, args, dx, dother)


forward = register("rotary_triton", _compute, _differentiate, empty, results=2, unread=read_by_no_gradient)
