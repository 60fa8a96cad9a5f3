"""The readout in one launch, and the gradients of all arguments in another, which recomputes the scores.

A program works on the heads of a group, whose queries and keys it loads once.
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
from ...gpu.reductions import add_parts
from ...gpu.rows import head_tile_of, load, rows_of
from .. import Arguments

TILE, WARPS = 2048, 8  # numbers of a head that a program holds at a time


@triton.jit
def input_gates(beta, first, rows, head, j, H: tl.constexpr, E: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr):
    """The input gate of each channel [ROWS,E·K] of a head."""
    r = first + tl.arange(0, ROWS)
    gates = tl.zeros([ROWS, j.shape[0]], tl.float32)
    for e in tl.static_range(E):
        gate = load(beta, r.to(tl.int64) * (H * E) + head * E + e, r < rows)[:, None]
        gates = tl.where((j // K == e)[None, :], gate, gates)
    return gates


@triton.jit
def keys(q, k, first, rows, q_row, k_row, group, j, SIZE: tl.constexpr, ROWS: tl.constexpr):
    """Queries and keys [ROWS,E·K] of a group, and the mask of those that exist."""
    in_q, inside = head_tile_of(first, rows, q_row, group, j, SIZE, ROWS)
    in_k, _ = head_tile_of(first, rows, k_row, group, j, SIZE, ROWS)
    return load(q, in_q, inside), load(k, in_k, inside), inside


@triton.jit(do_not_specialize=["rows"])
def read(
    o,
    q,
    k,
    v,
    beta,
    q_bias,
    k_bias,
    D,
    gate,
    y,
    rows,
    o_row,
    q_row,
    k_row,
    v_row,
    gate_row,
    GROUPS: tl.constexpr,
    H: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
):
    REPEATS: tl.constexpr = H // GROUPS
    first, group = tl.program_id(0) // GROUPS * ROWS, tl.program_id(0) % GROUPS
    c, j = tl.arange(0, V_BLOCK), tl.arange(0, K_BLOCK)
    query, key, _ = keys(q, k, first, rows, q_row, k_row, group, j, E * K, ROWS)
    for repeat in tl.range(0, REPEATS):
        h = group * REPEATS + repeat
        a = query + load(q_bias + h * (E * K), j, j < E * K)[None, :]
        b = key + load(k_bias + h * (E * K), j, j < E * K)[None, :]
        share = input_gates(beta, first, rows, h, j, H, E, K, ROWS)
        own = (tl.sum(a * b * share, 1) + tl.load(D + h).to(tl.float32))[:, None]
        in_o, inside = head_tile_of(first, rows, o_row, h, c, V, ROWS)
        in_v, _ = head_tile_of(first, rows, v_row, h, c, V, ROWS)
        result = load(o, in_o, inside) + own * load(v, in_v, inside)
        if gate is not None:
            in_gate, _ = head_tile_of(first, rows, gate_row, h, c, V, ROWS)
            z = load(gate, in_gate, inside)
            result *= z * tl.sigmoid(z)
        dense, _ = head_tile_of(first, rows, H * V, h, c, V, ROWS)
        tl.store(y + dense, result.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def differentiate(
    o,
    q,
    k,
    v,
    beta,
    q_bias,
    k_bias,
    D,
    gate,
    dy,
    do,
    dq,
    dk,
    dv,
    dbeta,
    dgate,
    parts,  # [tiles,H·(2·E·K+1)]: gradients of q_bias, k_bias and D, to be summed
    rows,
    o_row,
    q_row,
    k_row,
    v_row,
    gate_row,
    GROUPS: tl.constexpr,
    H: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
):
    REPEATS: tl.constexpr = H // GROUPS
    BIASES: tl.constexpr = H * E * K
    tile, group = tl.program_id(0) // GROUPS, tl.program_id(0) % GROUPS
    first, c, j = tile * ROWS, tl.arange(0, V_BLOCK), tl.arange(0, K_BLOCK)
    r = first + tl.arange(0, ROWS)
    parts += tile.to(tl.int64) * (2 * BIASES + H)
    query, key, channels = keys(q, k, first, rows, q_row, k_row, group, j, E * K, ROWS)
    of_query, of_key = tl.zeros([ROWS, K_BLOCK], tl.float32), tl.zeros([ROWS, K_BLOCK], tl.float32)
    for repeat in tl.range(0, REPEATS):
        h = group * REPEATS + repeat
        a = query + load(q_bias + h * (E * K), j, j < E * K)[None, :]
        b = key + load(k_bias + h * (E * K), j, j < E * K)[None, :]
        share = input_gates(beta, first, rows, h, j, H, E, K, ROWS)
        own = (tl.sum(a * b * share, 1) + tl.load(D + h).to(tl.float32))[:, None]
        dense, inside = head_tile_of(first, rows, H * V, h, c, V, ROWS)
        in_v, _ = head_tile_of(first, rows, v_row, h, c, V, ROWS)
        d, value = load(dy, dense, inside), load(v, in_v, inside)
        if gate is not None:
            in_o, _ = head_tile_of(first, rows, o_row, h, c, V, ROWS)
            in_gate, _ = head_tile_of(first, rows, gate_row, h, c, V, ROWS)
            z = load(gate, in_gate, inside)
            opened = tl.sigmoid(z)
            slope = opened * (1 + z * (1 - opened))
            of_gate = d * (load(o, in_o, inside) + own * value) * slope
            tl.store(dgate + dense, of_gate.to(dgate.dtype.element_ty), mask=inside)
            d *= z * opened
        tl.store(do + dense, d.to(do.dtype.element_ty), mask=inside)
        tl.store(dv + dense, (d * own).to(dv.dtype.element_ty), mask=inside)
        of_own = tl.sum(d * value, 1)
        tl.store(parts + 2 * BIASES + h, tl.sum(of_own, 0))
        for e in tl.static_range(E):
            score = tl.sum(tl.where((j // K == e)[None, :], a * b, 0.0), 1)
            at = r.to(tl.int64) * (H * E) + h * E + e
            tl.store(dbeta + at, (of_own * score).to(dbeta.dtype.element_ty), mask=r < rows)
        of_a, of_b = of_own[:, None] * share * b, of_own[:, None] * share * a
        tl.store(parts + h * (E * K) + j, tl.sum(of_a, 0), mask=j < E * K)
        tl.store(parts + BIASES + h * (E * K) + j, tl.sum(of_b, 0), mask=j < E * K)
        of_query += of_a
        of_key += of_b
    at, _ = head_tile_of(first, rows, GROUPS * E * K, group, j, E * K, ROWS)
    tl.store(dq + at, of_query.to(dq.dtype.element_ty), mask=channels)
    tl.store(dk + at, of_key.to(dk.dtype.element_ty), mask=channels)


def strided(args: Arguments) -> tuple[tuple[Tensor | None, ...], tuple[int, ...]]:
    """The tensors that kernels read, the number of tokens, and the strides of rows."""
    streams = [rows_of(x.flatten(2)) for x in args[:4]]
    tensors, counts, strides = zip(*streams, strict=True)
    gate, _, gate_row = (None, 0, 0) if args.gate is None else rows_of(args.gate.flatten(2))
    return (*tensors, *(x.contiguous() for x in args[4:8]), gate), (counts[0], *strides, gate_row)


def constants(args: Arguments) -> dict[str, int]:
    """The constants of both kernels."""
    (H, V), K, E = args.o.shape[2:], args.q.shape[3], args.subheads
    blocks = {"K_BLOCK": next_power_of_2(E * K), "V_BLOCK": next_power_of_2(V)}
    rows = min(16, max(1, TILE // max(blocks.values())))
    sizes = {"GROUPS": args.q.shape[2] // E, "H": H, "E": E, "K": K, "V": V}
    return {**sizes, "ROWS": rows, **blocks, "warps": WARPS}


def _empty(args: Arguments) -> tuple[Tensor]:
    return (new(args.o),)


def _compute(args: Arguments) -> tuple[Tensor]:
    (y,), sizes, (tensors, numbers) = _empty(args), constants(args), strided(args)
    enqueue(read, sizes["GROUPS"] * cdiv(numbers[0], sizes["ROWS"]), *tensors, y, *numbers, **sizes)
    return (y,)


def _differentiate(args: Arguments, needed: Any, dy: Tensor) -> Gradients:
    sizes, (tensors, numbers) = constants(args), strided(args)
    streams = {name: new(getattr(args, name)) for name in ("o", "q", "k", "v", "beta")}
    dgate, tiles = None if args.gate is None else new(args.gate), cdiv(numbers[0], sizes["ROWS"])
    learned = {name: getattr(args, name) for name in ("q_bias", "k_bias", "D")}
    lengths = [x.numel() for x in learned.values()]
    parts = new(dy, tiles, 1, sum(lengths), dtype=torch.float32)
    results = (*streams.values(), dgate, parts)
    enqueue(differentiate, tiles * sizes["GROUPS"], *tensors, dy.contiguous(), *results, *numbers, **sizes)
    sums = zip(learned.items(), add_parts(parts, torch.float32).flatten().split(lengths), strict=True)
    return {**streams, "gate": dgate, **{name: total.view(x.shape).to(x.dtype) for (name, x), total in sums}}


forward = register("skip_readout", _compute, _differentiate, _empty)
