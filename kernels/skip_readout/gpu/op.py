"""The readout in one launch, and the gradients of all arguments in another of the same kernel.

A program works on heads of one group, whose queries and keys it loads once.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.allocation import new
from ...core.autograd import Gradients, register
from ...gpu.device import multiprocessors
from ...gpu.launch import cdiv, enqueue, next_power_of_2
from ...gpu.reductions import add_parts
from ...gpu.rows import head_tile_of, load, rows_of
from .. import Arguments

TILE = 2048  # numbers of a head that a program holds at a time
WARPS, GRADIENT_WARPS = 4, 8  # of a program in the forward and in the backward pass
PROGRAMS = 4  # per multiprocessor in the forward pass, at least


@triton.jit
def input_gates(beta, first, rows, head, j, H: tl.constexpr, E: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr):
    """The input gate of each channel [ROWS,E·K] of a head."""
    r = first + tl.arange(0, ROWS)
    gates = tl.zeros([ROWS, j.shape[0]], tl.float32)
    for e in tl.static_range(E):
        gate = load(beta, r.to(tl.int64) * (H * E) + head * E + e, r < rows)[:, None]
        gates = tl.where((j // K == e)[None, :], gate, gates)
    return gates


@triton.jit(do_not_specialize=["rows", "heads"])
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
    y,  # like all below, None in the pass that does not need it
    dy,
    do,
    dq,
    dk,
    dv,
    dbeta,
    dgate,
    parts,  # [tiles,H·(2·E·K+1)]: gradients of q_bias, k_bias and D, to be summed
    rows,
    heads,  # of a program; all of a group in the backward pass, which sums over them
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
    """Write y, or the gradients if dy is given."""
    REPEATS: tl.constexpr = H // GROUPS
    BIASES: tl.constexpr = H * E * K
    parts_of_group = tl.cdiv(REPEATS, heads)
    begin, place = tl.program_id(0) % parts_of_group * heads, tl.program_id(0) // parts_of_group
    tile, group = place // GROUPS, place % GROUPS
    first, c, j = tile * ROWS, tl.arange(0, V_BLOCK), tl.arange(0, K_BLOCK)
    in_q, channels = head_tile_of(first, rows, q_row, group, j, E * K, ROWS)
    in_k, channels = head_tile_of(first, rows, k_row, group, j, E * K, ROWS)
    query, key = load(q, in_q, channels), load(k, in_k, channels)
    of_query, of_key = tl.zeros([ROWS, K_BLOCK], tl.float32), tl.zeros([ROWS, K_BLOCK], tl.float32)
    for repeat in tl.range(begin, tl.minimum(begin + heads, REPEATS)):
        h = group * REPEATS + repeat
        at = h * (E * K) + j
        a, b = query + load(q_bias, at, j < E * K)[None, :], key + load(k_bias, at, j < E * K)[None, :]
        share = input_gates(beta, first, rows, h, j, H, E, K, ROWS)
        own = (tl.sum(a * b * share, 1) + tl.load(D + h).to(tl.float32))[:, None]
        dense, inside = head_tile_of(first, rows, H * V, h, c, V, ROWS)
        in_o, inside = head_tile_of(first, rows, o_row, h, c, V, ROWS)
        in_v, inside = head_tile_of(first, rows, v_row, h, c, V, ROWS)
        value = load(v, in_v, inside)
        if gate is not None:
            in_gate, inside = head_tile_of(first, rows, gate_row, h, c, V, ROWS)
            z = load(gate, in_gate, inside)
            opened = tl.sigmoid(z)
        if dy is None:
            result = load(o, in_o, inside) + own * value
            if gate is not None:
                result *= z * opened
            tl.store(y + dense, result.to(y.dtype.element_ty), mask=inside)
        else:
            d = load(dy, dense, inside)
            if gate is not None:
                of_gate = d * (load(o, in_o, inside) + own * value) * opened * (1 + z * (1 - opened))
                tl.store(dgate + dense, of_gate.to(dgate.dtype.element_ty), mask=inside)
                d *= z * opened
            tl.store(do + dense, d.to(do.dtype.element_ty), mask=inside)
            tl.store(dv + dense, (d * own).to(dv.dtype.element_ty), mask=inside)
            of_own, r = tl.sum(d * value, 1), first + tl.arange(0, ROWS)
            for e in tl.static_range(E):
                score = tl.sum(tl.where((j // K == e)[None, :], a * b, 0.0), 1)
                gates = r.to(tl.int64) * (H * E) + h * E + e
                tl.store(dbeta + gates, (of_own * score).to(dbeta.dtype.element_ty), mask=r < rows)
            of_a, of_b = of_own[:, None] * share * b, of_own[:, None] * share * a
            sums = parts + tile.to(tl.int64) * (2 * BIASES + H)
            tl.store(sums + at, tl.sum(of_a, 0), mask=j < E * K)
            tl.store(sums + BIASES + at, tl.sum(of_b, 0), mask=j < E * K)
            tl.store(sums + 2 * BIASES + h, tl.sum(of_own, 0))
            of_query += of_a
            of_key += of_b
    if dy is not None:
        in_dq, channels = head_tile_of(first, rows, GROUPS * E * K, group, j, E * K, ROWS)
        tl.store(dq + in_dq, of_query.to(dq.dtype.element_ty), mask=channels)
        tl.store(dk + in_dq, of_key.to(dk.dtype.element_ty), mask=channels)


def _launch(args: Arguments, *results: Tensor | None, warps: int) -> None:
    """Launch the kernel with what it reads and writes after the arguments."""
    streams = [rows_of(x.flatten(2)) for x in args[:4]]
    tensors, (rows, *_), strides = zip(*streams, strict=True)
    gate, _, gate_row = (None, 0, 0) if args.gate is None else rows_of(args.gate.flatten(2))
    sizes = constants(args)
    programs, heads = sizes["GROUPS"] * cdiv(rows, sizes["ROWS"]), sizes["H"] // sizes["GROUPS"]
    if results[0] is not None:  # few tokens: several programs for a group
        parts = min(heads, cdiv(PROGRAMS * multiprocessors(args.o.device), max(programs, 1)))
        heads = cdiv(heads, parts)
        programs *= cdiv(sizes["H"] // sizes["GROUPS"], heads)
    inputs = (*tensors, *(x.contiguous() for x in args[4:8]), gate)
    enqueue(read, programs, *inputs, *results, rows, heads, *strides, gate_row, **sizes, warps=warps)


def constants(args: Arguments) -> dict[str, int]:
    """The constants of both passes."""
    (H, V), K, E = args.o.shape[2:], args.q.shape[3], args.subheads
    blocks = {"K_BLOCK": next_power_of_2(E * K), "V_BLOCK": next_power_of_2(V)}
    rows = min(16, max(1, TILE // max(blocks.values())))
    sizes = {"GROUPS": args.q.shape[2] // E, "H": H, "E": E, "K": K, "V": V}
    return {**sizes, "ROWS": rows, **blocks}


def _empty(args: Arguments) -> tuple[Tensor]:
    return (new(args.o),)


def _compute(args: Arguments) -> tuple[Tensor]:
    (y,) = _empty(args)
    _launch(args, y, *[None] * 8, warps=WARPS)
    return (y,)


def _differentiate(args: Arguments, needed: Any, dy: Tensor) -> Gradients:
    names = ("o", "q", "k", "v", "beta", "gate")
    streams = {name: None if (x := getattr(args, name)) is None else new(x) for name in names}
    learned = {name: getattr(args, name) for name in ("q_bias", "k_bias", "D")}
    lengths = [x.numel() for x in learned.values()]
    tiles = cdiv(dy.shape[0] * dy.shape[1], constants(args)["ROWS"])
    parts = new(dy, tiles, 1, sum(lengths), dtype=torch.float32)
    _launch(args, None, dy.contiguous(), *streams.values(), parts, warps=GRADIENT_WARPS)
    sums = zip(learned.items(), add_parts(parts, torch.float32).flatten().split(lengths), strict=True)
    return {**streams, **{name: total.view(x.shape).to(x.dtype) for (name, x), total in sums}}


forward = register("skip_readout", _compute, _differentiate, _empty)
