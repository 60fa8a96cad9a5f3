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
SPAN, COLUMNS = 128, 16  # blocks and channels that a program adds up at the same time
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
    dy,  # like dearlier, None for the sums of angles
    dearlier,
    ends,  # [B,blocks,H,P]: of a block, angles since the last start of a sequence, gradients up to its first end
    T,
    H: tl.constexpr,
    P: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks = tl.cdiv(T, BLOCK)
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    total, in_first = tl.zeros([HEADS, PAIRS], ends.dtype.element_ty), True  # sequence of the block
    for t in tl.range(block * BLOCK, tl.minimum(block * BLOCK + BLOCK, T)):
        if dy is None:
            _, units = angles_of(rates, steps, row * T + t, H, P, HEADS, PAIRS)
            total = tl.where(starts(positions, t), 0, total) + units
        else:
            in_first = in_first & ((t == block * BLOCK) | (starts(positions, t) == 0))
            at, inside = places_of(row * T + t, H, P, HEADS, PAIRS)
            total += load(dy, at, inside & in_first) + load(dearlier, at, inside & in_first)
    at, inside = places_of(row * blocks + block, H, P, HEADS, PAIRS)
    tl.store(ends + at, total, mask=inside)


@triton.jit
def joined(keeps, total, next_keeps, following):
    """Sums of two neighbours: the second one is of a new sequence unless it keeps the first one's total."""
    return keeps & next_keeps, tl.where(next_keeps != 0, total, 0) + following


@triton.jit(do_not_specialize=["T"])
def scan_blocks(
    ends,  # [B,blocks,CHANNELS]: sums of blocks
    positions,
    sums,  # [B,blocks,CHANNELS]: of the tokens of the sequence before each block, or after it
    T,
    CHANNELS: tl.constexpr,
    TILE: tl.constexpr,
    SPAN: tl.constexpr,  # blocks that are added up at a time
    AFTER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks, tiles = tl.cdiv(T, BLOCK), tl.cdiv(CHANNELS, TILE)
    row, c = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    carry = tl.zeros([TILE], ends.dtype.element_ty)
    for first in tl.range(0, blocks, SPAN):
        i = first + tl.arange(0, SPAN)
        block, place, exists = i - 1, i, (i > 0) & (i <= blocks)
        if AFTER:
            block, place = blocks - i, blocks - 1 - i
        at, inside = (row * blocks + block)[:, None] * CHANNELS + c[None, :], (c < CHANNELS)[None, :]
        x = tl.load(ends + at, mask=exists[:, None] & inside, other=0)
        if positions is None:
            total = tl.cumsum(x, 0) + carry[None, :]
        else:
            last = tl.minimum(block * BLOCK + BLOCK, T) - 1
            place_of_last, keeps = tl.load(positions + last, mask=exists, other=T), exists
            if AFTER:
                begins = tl.load(positions + block * BLOCK, mask=exists, other=0) == 0
                x = tl.where(begins[:, None], 0, x)
                keeps = (place_of_last >= last - block * BLOCK) & (begins == 0)
            else:
                keeps = place_of_last > last - block * BLOCK
            keeps = (keeps | (exists == 0)).to(tl.int32)[:, None] + tl.zeros([SPAN, TILE], tl.int32)
            keeps, total = tl.associative_scan((keeps, x), 0, joined)
            total += tl.where(keeps != 0, carry[None, :], 0)
        stored = (row * blocks + place)[:, None] * CHANNELS + c[None, :]
        tl.store(sums + stored, total, mask=(i < blocks)[:, None] & inside)
        carry = tl.sum(tl.where((i == first + SPAN - 1)[:, None], total, 0), 0)


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


def _sums(args: Arguments, plan: Plan, *gradients: Tensor | None) -> Tensor:
    """The sums [B,blocks,H,P] of the angles before each block, or of the gradients after it, in the same sequence."""
    angles = gradients[0] is None
    (B, T, P), H, dtype = args.rates.shape, args.steps.shape[2], torch.int64 if angles else torch.float32
    ends, sums = (new(args.rates, B, plan.blocks, H, P, dtype=dtype) for _ in range(2))
    inputs = (args.rates.contiguous(), args.steps.contiguous(), plan.positions, *gradients)
    enqueue(sum_blocks, B * plan.blocks, *inputs, ends, T, **plan.constants)
    span = min(SPAN, next_power_of_2(plan.blocks))
    sizes = {"CHANNELS": H * P, "TILE": COLUMNS, "SPAN": span, "AFTER": not angles, "BLOCK": BLOCK}
    enqueue(scan_blocks, B * cdiv(H * P, COLUMNS), ends, plan.positions, sums, T, **sizes)
    return sums


def _empty(args: Arguments) -> tuple[Tensor, Tensor]:
    shape = (*args.steps.shape, args.rates.shape[2])
    return new(args.rates, *shape), new(args.rates, *shape)


def _compute(args: Arguments) -> tuple[Tensor, Tensor]:
    (y, earlier), plan, T = _empty(args), _plan(args), args.rates.shape[1]
    inputs = (args.rates.contiguous(), args.steps.contiguous(), plan.positions, _sums(args, plan, None, None))
    enqueue(sum_tokens, plan.rows * plan.blocks, *inputs, y, earlier, T, **plan.constants)
    return y, earlier


def _differentiate(args: Arguments, needed: Any, dy: Tensor | None, dearlier: Tensor | None) -> Gradients:
    plan, T = _plan(args), args.rates.shape[1]
    rates, steps = args.rates.contiguous(), args.steps.contiguous()
    arrived = dy if dy is not None else dearlier
    assert arrived is not None
    arriving = [torch.zeros_like(arrived) if d is None else d.contiguous() for d in (dy, dearlier)]
    gradients = {"rates": new(rates), "steps": new(steps)}
    tensors = (rates, steps, plan.positions, *arriving, _sums(args, plan, *arriving), *gradients.values())
    enqueue(differentiate, plan.rows * plan.blocks, *tensors, T, **plan.constants)
    return gradients


forward = register("turns", _compute, _differentiate, _empty, results=2)
