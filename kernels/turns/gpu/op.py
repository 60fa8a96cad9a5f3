"""The sums in three launches, and their gradients in three: sums of blocks, sums of the blocks before, sums of tokens.

Angles and their gradients are recomputed from rates and steps, and never stored. The forward pass adds angles in int64,
in units of 1 / GRID.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.allocation import new
from ...core.autograd import Gradients, register
from ...core.documents import places
from ...gpu.launch import cdiv, enqueue, next_power_of_2
from ...gpu.rows import load
from .. import GRID

BLOCK = 32  # tokens that a program adds up, one after the other
PER_WARP, FEWEST_WARPS = 512, 4  # angles of a token
UNIT = tl.constexpr(GRID)
PART_OF_A_TURN = tl.constexpr(int(GRID) - 1)  # bits of a sum in units of 1 / GRID
# fp64 has no digits behind the point from here on: adding and subtracting it rounds to the nearest even number
WHOLE = tl.constexpr(1.5 * 2.0**52)


@triton.jit
def places_of(r, H: tl.constexpr, P: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr):
    """Offsets of a token's numbers [H,P] in a dense tensor, and the mask of those that exist."""
    h, p = tl.arange(0, HEADS)[:, None], tl.arange(0, PAIRS)[None, :]
    return r * (H * P) + h * P + p, (h < H) & (p < P)


@triton.jit
def factors(rates, steps, r, H: tl.constexpr, P: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr):
    """The rates [1,P] and the steps [H,1] of a token."""
    h, p = tl.arange(0, HEADS), tl.arange(0, PAIRS)
    return load(rates, r * P + p, p < P)[None, :], load(steps, r * H + h, h < H)[:, None]


@triton.jit
def angles_of(rates, steps, r, H: tl.constexpr, P: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr):
    """The angles [H,P] of a token, in turns and in units of 1 / GRID."""
    rate, step = factors(rates, steps, r, H, P, HEADS, PAIRS)
    angles = (rate * step) * 0.5
    return angles, (angles.to(tl.float64) * UNIT + WHOLE - WHOLE).to(tl.int64)


@triton.jit
def starts(positions, t):
    """Return whether a token is the first of its sequence."""
    return t == 0 if positions is None else tl.load(positions + t) == 0


@triton.jit(do_not_specialize=["T"])
def sum_blocks(
    rates,
    steps,
    positions,
    ends,  # [B,blocks,H,P]: of the tokens of a block since the last start of a sequence
    T,
    H: tl.constexpr,
    P: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks = tl.cdiv(T, BLOCK)
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    total = tl.zeros([HEADS, PAIRS], tl.int64)
    for t in tl.range(block * BLOCK, tl.minimum(block * BLOCK + BLOCK, T)):
        _, units = angles_of(rates, steps, row * T + t, H, P, HEADS, PAIRS)
        total = tl.where(starts(positions, t), 0, total) + units
    at, inside = places_of(row * blocks + block, H, P, HEADS, PAIRS)
    tl.store(ends + at, total, mask=inside)


@triton.jit(do_not_specialize=["T"])
def sum_before(
    ends,  # overwritten by the sum of the tokens of the sequence before each block
    positions,
    T,
    H: tl.constexpr,
    P: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks, row = tl.cdiv(T, BLOCK), tl.program_id(0).to(tl.int64)
    total = tl.zeros([HEADS, PAIRS], tl.int64)
    for block in tl.range(0, blocks):
        at, inside = places_of(row * blocks + block, H, P, HEADS, PAIRS)
        end = tl.load(ends + at, mask=inside, other=0)
        tl.store(ends + at, total, mask=inside)
        within = False  # whether a sequence starts in the block
        if positions is not None:
            last = tl.minimum(block * BLOCK + BLOCK, T) - 1
            within = tl.load(positions + last) <= last - block * BLOCK
        total = tl.where(within, 0, total) + end


@triton.jit(do_not_specialize=["T"])
def sum_tokens(
    rates,
    steps,
    positions,
    before,
    y,
    earlier,
    T,
    H: tl.constexpr,
    P: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks = tl.cdiv(T, BLOCK)
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    at, inside = places_of(row * blocks + block, H, P, HEADS, PAIRS)
    total = tl.load(before + at, mask=inside, other=0)
    for t in tl.range(block * BLOCK, tl.minimum(block * BLOCK + BLOCK, T)):
        at, inside = places_of(row * T + t, H, P, HEADS, PAIRS)
        total = tl.where(starts(positions, t), 0, total)
        tl.store(earlier + at, fraction(total), mask=inside)
        angles, units = angles_of(rates, steps, row * T + t, H, P, HEADS, PAIRS)
        total += units
        tl.store(y + at, fraction(total) + angles * 0.0, mask=inside)  # NaN for angles that are not finite


@triton.jit
def fraction(total):
    """The part of a turn of sums in units of 1 / GRID."""
    return ((total & PART_OF_A_TURN).to(tl.float64) / UNIT).to(tl.float32)


@triton.jit(do_not_specialize=["T"])
def sum_gradients_of_blocks(
    dy,
    dearlier,
    positions,
    ends,  # [B,blocks,H,P]: of the tokens of a block up to the first end of a sequence
    T,
    H: tl.constexpr,
    P: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks = tl.cdiv(T, BLOCK)
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    total, in_first = tl.zeros([HEADS, PAIRS], tl.float32), True  # sequence of the block
    for t in tl.range(block * BLOCK, tl.minimum(block * BLOCK + BLOCK, T)):
        in_first = in_first & ((t == block * BLOCK) | (starts(positions, t) == 0))
        at, inside = places_of(row * T + t, H, P, HEADS, PAIRS)
        total += load(dy, at, inside & in_first) + load(dearlier, at, inside & in_first)
    at, inside = places_of(row * blocks + block, H, P, HEADS, PAIRS)
    tl.store(ends + at, total, mask=inside)


@triton.jit(do_not_specialize=["T"])
def sum_gradients_after(
    ends,  # overwritten by the sum of the tokens of the sequence after each block
    positions,
    T,
    H: tl.constexpr,
    P: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks, row = tl.cdiv(T, BLOCK), tl.program_id(0).to(tl.int64)
    total = tl.zeros([HEADS, PAIRS], tl.float32)
    for i in tl.range(0, blocks):
        block = blocks - 1 - i
        at, inside = places_of(row * blocks + block, H, P, HEADS, PAIRS)
        end = tl.load(ends + at, mask=inside, other=0.0)
        tl.store(ends + at, total, mask=inside)
        begins, stops = False, False  # whether a sequence starts at the first token of the block, and at a later one
        if positions is not None:
            last = tl.minimum(block * BLOCK + BLOCK, T) - 1
            stops = tl.load(positions + last) < last - block * BLOCK
            begins = tl.load(positions + block * BLOCK) == 0
        total = tl.where(begins, 0.0, tl.where(stops, 0.0, total) + end)


@triton.jit(do_not_specialize=["T"])
def differentiate(
    rates,
    steps,
    positions,
    dy,
    dearlier,
    after,
    drates,
    dsteps,
    T,
    H: tl.constexpr,
    P: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks = tl.cdiv(T, BLOCK)
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    h, p = tl.arange(0, HEADS), tl.arange(0, PAIRS)
    at, inside = places_of(row * blocks + block, H, P, HEADS, PAIRS)
    total = load(after, at, inside)
    stop = tl.minimum(block * BLOCK + BLOCK, T)
    for i in tl.range(0, stop - block * BLOCK):
        t = stop - 1 - i
        at, inside = places_of(row * T + t, H, P, HEADS, PAIRS)
        of_earlier = load(dearlier, at, inside)
        total += load(dy, at, inside) + of_earlier
        rate, step = factors(rates, steps, row * T + t, H, P, HEADS, PAIRS)
        of_angle = (total - of_earlier) * 0.5
        tl.store(drates + (row * T + t) * P + p, tl.sum(of_angle * step, 0), mask=p < P)
        tl.store(dsteps + (row * T + t) * H + h, tl.sum(of_angle * rate, 1), mask=h < H)
        total = tl.where(starts(positions, t), 0.0, total)


class Arguments(NamedTuple):
    rates: Tensor  # [B,T,P]
    steps: Tensor  # [B,T,H]
    cu_seqlens: Tensor | None


class Plan(NamedTuple):
    """Numbers that all launches have in common."""

    rows: int
    blocks: int
    positions: Tensor | None
    constants: dict[str, int]


def _plan(args: Arguments) -> Plan:
    B, T, P = args.rates.shape
    H = args.steps.shape[2]
    sizes = {"H": H, "P": P, "HEADS": next_power_of_2(H), "PAIRS": next_power_of_2(P), "BLOCK": BLOCK}
    positions = None if args.cu_seqlens is None else places(args.cu_seqlens, T)[1]
    warps = min(16, max(FEWEST_WARPS, sizes["HEADS"] * sizes["PAIRS"] // PER_WARP))
    return Plan(B, cdiv(T, BLOCK), positions, {**sizes, "warps": warps})


def _empty(args: Arguments) -> tuple[Tensor, Tensor]:
    shape = (*args.steps.shape, args.rates.shape[2])
    return new(args.rates, *shape), new(args.rates, *shape)


def _compute(args: Arguments) -> tuple[Tensor, Tensor]:
    (y, earlier), plan, T = _empty(args), _plan(args), args.rates.shape[1]
    rates, steps = args.rates.contiguous(), args.steps.contiguous()
    ends = new(rates, plan.rows, plan.blocks, *y.shape[2:], dtype=torch.int64)
    count = plan.rows * plan.blocks
    enqueue(sum_blocks, count, rates, steps, plan.positions, ends, T, **plan.constants)
    enqueue(sum_before, plan.rows, ends, plan.positions, T, **plan.constants)
    enqueue(sum_tokens, count, rates, steps, plan.positions, ends, y, earlier, T, **plan.constants)
    return y, earlier


def _differentiate(args: Arguments, needed: Any, dy: Tensor | None, dearlier: Tensor | None) -> Gradients:
    plan, T = _plan(args), args.rates.shape[1]
    rates, steps = args.rates.contiguous(), args.steps.contiguous()
    arrived = dy if dy is not None else dearlier
    assert arrived is not None
    dy, dearlier = (torch.zeros_like(arrived) if d is None else d.contiguous() for d in (dy, dearlier))
    ends = new(rates, plan.rows, plan.blocks, *arrived.shape[2:], dtype=torch.float32)
    count, gradients = plan.rows * plan.blocks, {"rates": new(rates), "steps": new(steps)}
    enqueue(sum_gradients_of_blocks, count, dy, dearlier, plan.positions, ends, T, **plan.constants)
    enqueue(sum_gradients_after, plan.rows, ends, plan.positions, T, **plan.constants)
    tensors = (rates, steps, plan.positions, dy, dearlier, ends, *gradients.values())
    enqueue(differentiate, count, *tensors, T, **plan.constants)
    return gradients


forward = register("turns", _compute, _differentiate, _empty, results=2)
