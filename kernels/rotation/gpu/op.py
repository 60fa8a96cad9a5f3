"""The rotation in one launch, and the gradients of all arguments in another, which saves the arguments alone."""

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
from ...gpu.rows import load

TILE, WARPS = 512, 1  # numbers of a head that a program holds at a time; sums over its rows stay within a warp
TURN = tl.constexpr(6.283185307179586)


@triton.jit
def halves(x, PAIRS: tl.constexpr):
    """The first and the second numbers [ROWS,PAIRS] of the pairs in a tile [ROWS,2·PAIRS]."""
    return tl.split(tl.reshape(x, [x.shape[0], PAIRS, 2]))


@triton.jit
def whole(a, b, PAIRS: tl.constexpr):
    """The tile [ROWS,2·PAIRS] of these halves."""
    return tl.reshape(tl.join(a, b), [a.shape[0], 2 * PAIRS])


@triton.jit
def places(first, rows, head, HEADS: tl.constexpr, SIZE: tl.constexpr, c, ROWS: tl.constexpr):
    """Offsets in a dense tensor [rows,HEADS,SIZE] of a head's numbers c, and the mask of those that exist."""
    r = (first + tl.arange(0, ROWS))[:, None].to(tl.int64)
    return (r * HEADS + head) * SIZE + c[None, :], (r < rows) & (c < SIZE)[None, :]


@triton.jit
def turned(
    x,
    bias,
    angles,
    first,
    rows,
    group,
    head,
    GROUPS: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The halves of a head's rotated tile, its cosines and its sines."""
    c, p = tl.arange(0, 2 * PAIRS), tl.arange(0, PAIRS)
    at, inside = places(first, rows, group, GROUPS, K, c, ROWS)
    a, b = halves(load(x, at, inside) + load(bias, head * K + c, c < K)[None, :], PAIRS)
    at, inside = places(first, rows, head, H, P, p, ROWS)
    radians = load(angles, at, inside) * TURN
    cos, sin = tl.cos(radians), tl.sin(radians)
    return a * cos - b * sin, a * sin + b * cos, cos, sin


@triton.jit(do_not_specialize=["rows"])
def rotate(
    x,
    bias,
    angles,
    y,
    rows,
    GROUPS: tl.constexpr,
    E: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
):
    REPEATS: tl.constexpr = H // GROUPS
    first, head = tl.program_id(0) // H * ROWS, tl.program_id(0) % H
    group = head // (REPEATS * E) * E + head % E
    a, b, _, _ = turned(x, bias, angles, first, rows, group, head, GROUPS, H, K, P, PAIRS, ROWS)
    at, inside = places(first, rows, head, H, K, tl.arange(0, 2 * PAIRS), ROWS)
    tl.store(y + at, whole(a, b, PAIRS).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def differentiate(
    x,
    bias,
    angles,
    dy,
    dx,
    dangles,
    parts,  # [tiles,H·E,K]: gradients of the bias, to be summed
    rows,
    GROUPS: tl.constexpr,
    E: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
):
    REPEATS: tl.constexpr = H // GROUPS
    tile, group = tl.program_id(0) // GROUPS, tl.program_id(0) % GROUPS
    first, c, p = tile * ROWS, tl.arange(0, 2 * PAIRS), tl.arange(0, PAIRS)
    total = tl.zeros([ROWS, 2 * PAIRS], tl.float32)
    for repeat in tl.range(0, REPEATS):
        head = (group // E * REPEATS + repeat) * E + group % E
        a, b, cos, sin = turned(x, bias, angles, first, rows, group, head, GROUPS, H, K, P, PAIRS, ROWS)
        at, inside = places(first, rows, head, H, K, c, ROWS)
        da, db = halves(load(dy, at, inside), PAIRS)
        at, inside = places(first, rows, head, H, P, p, ROWS)
        tl.store(dangles + at, ((db * a - da * b) * TURN).to(dangles.dtype.element_ty), mask=inside)
        back = whole(da * cos + db * sin, db * cos - da * sin, PAIRS)
        tl.store(parts + (tile.to(tl.int64) * H + head) * K + c, tl.sum(back, 0), mask=c < K)
        total += back
    at, inside = places(first, rows, group, GROUPS, K, c, ROWS)
    tl.store(dx + at, total.to(dx.dtype.element_ty), mask=inside)


class Arguments(NamedTuple):
    x: Tensor  # [B,T,G·E,K]
    bias: Tensor  # [H·E,K]
    angles: Tensor  # [B,T,H·E,P]
    subheads: int


def _sizes(args: Arguments) -> dict[str, int]:
    """The constants of both kernels."""
    K, pairs = args.x.shape[3], next_power_of_2(cdiv(args.x.shape[3], 2))
    heads = {"GROUPS": args.x.shape[2], "E": args.subheads, "H": args.bias.shape[0]}
    return heads | {"K": K, "P": args.angles.shape[3], "PAIRS": pairs, "ROWS": min(16, max(1, TILE // (2 * pairs)))}


def _empty(args: Arguments) -> tuple[Tensor]:
    B, T, _, K = args.x.shape
    return (new(args.x, B, T, args.bias.shape[0], K),)


def _compute(args: Arguments) -> tuple[Tensor]:
    (y,), sizes, rows = _empty(args), _sizes(args), args.x.shape[0] * args.x.shape[1]
    tensors = (x.contiguous() for x in (args.x, args.bias, args.angles))
    enqueue(rotate, cdiv(rows, sizes["ROWS"]) * sizes["H"], *tensors, y, rows, **sizes, warps=WARPS)
    return (y,)


def _differentiate(args: Arguments, needed: Any, dy: Tensor) -> Gradients:
    sizes, rows = _sizes(args), args.x.shape[0] * args.x.shape[1]
    tiles = cdiv(rows, sizes["ROWS"])
    gradients = {name: new(getattr(args, name)) for name in ("x", "angles")}
    parts = new(dy, tiles, 1, args.bias.numel(), dtype=torch.float32)
    tensors = (x.contiguous() for x in (args.x, args.bias, args.angles, dy))
    enqueue(differentiate, tiles * sizes["GROUPS"], *tensors, *gradients.values(), parts, rows, **sizes, warps=WARPS)
    return {**gradients, "bias": add_parts(parts, args.bias.dtype).view(args.bias.shape)}


forward = register("rotation", _compute, _differentiate, _empty)
