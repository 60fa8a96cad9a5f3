"""Rotary positions in one launch; the backward pass is the same kernel, which turns the other way."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...core.autograd import Gradients, register
from ...gpu.launch import cdiv, enqueue, next_power_of_2
from ...gpu.overlap import wait
from ...gpu.rows import load
from ...norm.gpu.op import MOST_EARLY
from .. import Arguments, empty

TILE = 1024  # pairs of a program


@triton.jit(do_not_specialize=["T", "position_row"])
def turn(
    x,  # [B,T,H,D], with any strides of rows and heads
    positions,  # [B or 1,T]
    rates,  # [P]
    y,  # [B,T,H,D]
    T,
    x_batch,
    x_row,
    x_head,
    position_row,  # 0 if all rows have the same positions
    amplitude,
    sign,
    H: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    HEADS: tl.constexpr,  # of a program
    PAIRS: tl.constexpr,
    REST: tl.constexpr,  # channels that do not turn, rounded up to a power of two; 0 for none
    OVERLAP: tl.constexpr,
):
    wait(OVERLAP)
    BLOCKS: tl.constexpr = (H + HEADS - 1) // HEADS
    row = tl.program_id(0) // BLOCKS
    h, p = (tl.program_id(0) % BLOCKS * HEADS + tl.arange(0, HEADS))[:, None], tl.arange(0, PAIRS)[None, :]
    b, t = row // T, row % T
    source = x + b.to(tl.int64) * x_batch + t.to(tl.int64) * x_row + h * x_head
    target = y + (row.to(tl.int64) * H + h) * D
    inside = (h < H) & (p < P)
    position = tl.load(positions + b * position_row + t).to(tl.float32)
    angle = position * load(rates, p, p < P)
    cos, sin = tl.cos(angle) * amplitude, tl.sin(angle) * (amplitude * sign)
    a, b = load(source, p, inside), load(source, P + p, inside)
    tl.store(target + p, (a * cos - b * sin).to(y.dtype.element_ty), mask=inside)
    tl.store(target + P + p, (a * sin + b * cos).to(y.dtype.element_ty), mask=inside)
    if REST:
        c = 2 * P + tl.arange(0, REST)[None, :]
        inside = (h < H) & (c < D)
        tl.store(target + c, tl.load(source + c, mask=inside), mask=inside)


def _launch(args: Arguments, sign: float) -> tuple[Tensor]:
    x, (y,) = args.x if args.x.stride(-1) == 1 else args.x.contiguous(), empty(args)
    B, T, H, D = x.shape
    P, pairs = len(args.rates), next_power_of_2(len(args.rates))
    heads = max(1, min(next_power_of_2(H), TILE // pairs))
    rest = next_power_of_2(D - 2 * P) if D > 2 * P else 0
    positions = args.positions.contiguous()
    tensors = (x, positions, args.rates.contiguous(), y)
    numbers = (T, *x.stride()[:3], 0 if len(positions) == 1 else T, args.amplitude, sign)
    sizes = {"H": H, "D": D, "P": P, "HEADS": heads, "PAIRS": pairs, "REST": rest}
    programs = B * T * cdiv(H, heads)
    enqueue(turn, programs, *tensors, *numbers, **sizes, overlap=programs <= MOST_EARLY)
    return (y,)


def _compute(args: Arguments) -> tuple[Tensor]:
    return _launch(args, 1.0)


def _differentiate(args: Arguments, needed: Any, dy: Tensor) -> Gradients:
    return {"x": _launch(args._replace(x=dy), -1.0)[0]}


forward = register("rotary_triton", _compute, _differentiate, empty, unread=lambda args: ("x",))
