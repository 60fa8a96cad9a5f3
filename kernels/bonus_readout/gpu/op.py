"""The readout in one launch, and the gradients of all arguments in another, which recomputes norm and bonus.

A program works on one head, whose parameters it loads once.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.allocation import new
from ...core.autograd import Gradients, register
from ...gpu.launch import cdiv, enqueue, next_power_of_2
from ...gpu.overlap import MOST_EARLY, wait
from ...gpu.reductions import add_parts
from ...gpu.rows import head_tile_of, load, rows_of, walkers
from .. import Arguments

ELEMENTS, WARPS = 1024, 4  # of a tile, and of a program
PROGRAMS = 8  # per multiprocessor in the backward pass; each stores its part of the gradients of the parameters


@triton.jit
def normed(o, inside, eps, V: tl.constexpr):
    """The norm of each row without weight and bias, and 1 / √(var + eps) [ROWS,1]."""
    centred = tl.where(inside, o - tl.sum(o, 1)[:, None] / V, 0.0)
    root = tl.rsqrt(tl.sum(centred * centred, 1) / V + eps)[:, None]
    return centred * root, root


@triton.jit(do_not_specialize=["rows"])
def read(
    o,
    q,
    k,
    v,
    gate,
    r_k,
    weight,
    bias,
    y,
    rows,
    o_row,
    q_row,
    k_row,
    v_row,
    gate_row,
    eps,
    H: tl.constexpr,
    V: tl.constexpr,
    K: tl.constexpr,  # channels of all subheads of a head
    ROWS: tl.constexpr,
    V_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait(OVERLAP)
    h, first = tl.program_id(0) % H, tl.program_id(0) // H * ROWS
    c, j = tl.arange(0, V_BLOCK), tl.arange(0, K_BLOCK)
    at, inside = head_tile_of(first, rows, o_row, h, c, V, ROWS)
    n, _ = normed(load(o, at, inside), inside, eps, V)
    in_q, keys = head_tile_of(first, rows, q_row, h, j, K, ROWS)
    in_k, _ = head_tile_of(first, rows, k_row, h, j, K, ROWS)
    share = load(r_k + h * K, j, j < K)[None, :]
    own = tl.sum(load(q, in_q, keys) * load(k, in_k, keys) * share, 1)[:, None]
    in_v, _ = head_tile_of(first, rows, v_row, h, c, V, ROWS)
    in_gate, _ = head_tile_of(first, rows, gate_row, h, c, V, ROWS)
    scale, shift = load(weight + h * V, c, c < V)[None, :], load(bias + h * V, c, c < V)[None, :]
    result = (n * scale + shift + own * load(v, in_v, inside)) * load(gate, in_gate, inside)
    dense, _ = head_tile_of(first, rows, H * V, h, c, V, ROWS)
    tl.store(y + dense, result.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def differentiate(
    o,
    q,
    k,
    v,
    gate,
    r_k,
    weight,
    bias,
    dy,
    do,
    dq,
    dk,
    dv,
    dgate,
    parts,  # [programs / H,H·(2·V+K)]: gradients of weight, bias and r_k, to be summed
    rows,
    o_row,
    q_row,
    k_row,
    v_row,
    gate_row,
    eps,
    H: tl.constexpr,
    V: tl.constexpr,
    K: tl.constexpr,  # channels of all subheads of a head
    ROWS: tl.constexpr,
    V_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
):
    h, walker = tl.program_id(0) % H, tl.program_id(0) // H
    c, j = tl.arange(0, V_BLOCK), tl.arange(0, K_BLOCK)
    share = load(r_k + h * K, j, j < K)[None, :]
    scale, shift = load(weight + h * V, c, c < V)[None, :], load(bias + h * V, c, c < V)[None, :]
    weights, shares = tl.zeros([ROWS, V_BLOCK], tl.float32), tl.zeros([ROWS, K_BLOCK], tl.float32)
    biases = weights
    for first in tl.range(walker * ROWS, rows, tl.num_programs(0) // H * ROWS):
        at, inside = head_tile_of(first, rows, o_row, h, c, V, ROWS)
        n, root = normed(load(o, at, inside), inside, eps, V)
        in_q, keys = head_tile_of(first, rows, q_row, h, j, K, ROWS)
        in_k, _ = head_tile_of(first, rows, k_row, h, j, K, ROWS)
        query, key = load(q, in_q, keys), load(k, in_k, keys)
        own = tl.sum(query * key * share, 1)[:, None]
        in_v, _ = head_tile_of(first, rows, v_row, h, c, V, ROWS)
        in_gate, _ = head_tile_of(first, rows, gate_row, h, c, V, ROWS)
        dense, _ = head_tile_of(first, rows, H * V, h, c, V, ROWS)
        value, d = load(v, in_v, inside), load(dy, dense, inside)
        opened = d * (n * scale + shift + own * value)
        d *= load(gate, in_gate, inside)
        tl.store(dgate + dense, opened.to(dgate.dtype.element_ty), mask=inside)
        tl.store(dv + dense, (d * own).to(dv.dtype.element_ty), mask=inside)
        down = tl.sum(d * value, 1)[:, None]
        biases += d
        weights += d * n
        d *= scale
        mean, along = tl.sum(d, 1)[:, None] / V, tl.sum(d * n, 1)[:, None] / V
        tl.store(do + dense, (root * (d - mean - n * along)).to(do.dtype.element_ty), mask=inside)
        of_keys, _ = head_tile_of(first, rows, H * K, h, j, K, ROWS)
        tl.store(dq + of_keys, (down * key * share).to(dq.dtype.element_ty), mask=keys)
        tl.store(dk + of_keys, (down * query * share).to(dk.dtype.element_ty), mask=keys)
        shares += down * query * key
    at = parts + walker * (H * (2 * V + K)) + h * V + c
    tl.store(at, tl.sum(weights, 0), mask=c < V)
    tl.store(at + H * V, tl.sum(biases, 0), mask=c < V)
    tl.store(parts + walker * (H * (2 * V + K)) + 2 * H * V + h * K + j, tl.sum(shares, 0), mask=j < K)


def strided(args: Arguments) -> tuple[tuple[Tensor, ...], int, tuple[Any, ...]]:
    """The tensors that kernels read, the number of tokens, and the other numbers."""
    streams = [rows_of(x) for x in (*(x.flatten(-2) for x in args[:4]), args.gate)]
    tensors, counts, strides = zip(*streams, strict=True)
    parameters = (x.contiguous() for x in args[5:8])
    return (*tensors, *parameters), counts[0], (counts[0], *strides, args.eps)


def constants(args: Arguments) -> dict[str, int]:
    """The constants of both kernels."""
    H, V = args.weight.shape
    K = args.r_k.numel() // H
    blocks = {"V_BLOCK": next_power_of_2(V), "K_BLOCK": next_power_of_2(K)}
    rows = max(1, ELEMENTS // max(blocks.values()))
    return {"H": H, "V": V, "K": K, "ROWS": rows, **blocks, "warps": WARPS}


def _empty(args: Arguments) -> tuple[Tensor]:
    *outer, H, V = args.o.shape
    return (new(args.o, *outer, H * V),)


def _compute(args: Arguments) -> tuple[Tensor]:
    (y,), sizes, (tensors, rows, numbers) = _empty(args), constants(args), strided(args)
    programs = sizes["H"] * cdiv(rows, sizes["ROWS"])
    enqueue(read, programs, *tensors, y, *numbers, **sizes, overlap=programs <= MOST_EARLY)
    return (y,)


def _differentiate(args: Arguments, needed: Any, dy: Tensor) -> Gradients:
    sizes, (tensors, rows, numbers) = constants(args), strided(args)
    streams = {name: new(getattr(args, name)) for name in ("o", "q", "k", "v", "gate")}
    count = walkers(rows, sizes["ROWS"], dy.device, PROGRAMS, sizes["H"])
    lengths = [args.weight.numel(), args.bias.numel(), args.r_k.numel()]
    parts = new(dy, count, 1, sum(lengths), dtype=torch.float32)
    programs = count * sizes["H"]
    enqueue(differentiate, programs, *tensors, dy.contiguous(), *streams.values(), parts, *numbers, **sizes)
    sums = add_parts(parts, torch.float32).flatten().split(lengths)
    learned = {"weight": args.weight, "bias": args.bias, "r_k": args.r_k}
    named = zip(learned.items(), sums, strict=True)
    return {**streams, **{name: total.view(x.shape).to(x.dtype) for (name, x), total in named}}


forward = register("bonus_readout", _compute, _differentiate, _empty)
