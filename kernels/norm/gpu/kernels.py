"""RMS normalisation with an optional gate, and LayerNorm: whole rows, in fp32 between one load and one store."""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from ...gpu.overlap import prefetch, wait
from ...gpu.rows import load
from ...gpu.tiles import activated


@triton.jit
def tile_of(first, rows, INNER: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The rows [ROWS, BLOCK] from `first` on: outer index, offsets within it, offsets in dense tensors, and mask."""
    r, c = (first + tl.arange(0, ROWS))[:, None].to(tl.int64), tl.arange(0, BLOCK)[None, :]
    return r // INNER, r % INNER * D + c, r * D + c, (r < rows) & (c < D)


@triton.jit
def inverse_root(u, eps, D: tl.constexpr):
    """1 / √(mean u² + eps) of every row [ROWS, 1]."""
    return tl.rsqrt(tl.sum(u * u, 1) / D + eps)[:, None]


@triton.jit
def centred(u, inside, D: tl.constexpr):
    """u minus the mean of every row."""
    return tl.where(inside, u - (tl.sum(u, 1) / D)[:, None], 0.0)


@triton.jit(do_not_specialize=["rows"])
def forward(
    x,  # [outer, INNER, D], like gate: rows of INNER · D contiguous numbers
    gate,
    weight,  # [D]
    bias,  # [D] of a LayerNorm
    added,  # [rows, D]
    y,  # [rows, D]
    total,  # [rows, D]: x + added
    rows,
    x_outer,
    gate_outer,
    eps,
    INNER: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    GATE: tl.constexpr,  # none, first or last: where it is applied
    ACTIVATION: tl.constexpr,  # of the gate: silu or sigmoid
    OVERLAP: tl.constexpr,
):
    prefetch(weight, 0, D, D, OVERLAP)
    wait(OVERLAP)
    outer, within, dense, inside = tile_of(tl.program_id(0) * ROWS, rows, INNER, D, ROWS, BLOCK)
    u = load(x, outer * x_outer + within, inside)
    if weight is not None:  # its latency is that of x
        c = tl.arange(0, BLOCK)
        scale = load(weight, c, c < D)[None, :]
    if added is not None:
        both = (u + load(added, dense, inside)).to(total.dtype.element_ty)
        tl.store(total + dense, both, mask=inside)
        u = both.to(tl.float32)  # as if the sum were read back
    if GATE != "none":
        g = load(gate, outer * gate_outer + within, inside)
        opened, _ = activated(g, ACTIVATION)
    if GATE == "first":
        u *= opened
    if bias is not None:
        u = centred(u, inside, D)
    h = u * inverse_root(u, eps, D)
    if weight is not None:
        h *= scale
    if bias is not None:
        h += load(bias, c, c < D)[None, :]
    if GATE == "last":
        h *= opened
    tl.store(y + dense, h.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def backward(
    x,  # [outer, INNER, D], like gate
    gate,
    weight,
    bias,
    dy,  # [rows, D]
    dtotal,  # [rows, D]: another gradient of x, to be added
    dx,  # [rows, D], like dgate
    dgate,
    dweight,  # [programs, D], or with a bias [programs, 2·D], its gradients last: to be summed over the programs
    rows,
    x_outer,
    gate_outer,
    eps,
    INNER: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    GATE: tl.constexpr,  # none, first or last: where it is applied
    ACTIVATION: tl.constexpr,  # of the gate: silu or sigmoid
    STAGES: tl.constexpr,  # tiles on their way at a time
):
    c = tl.arange(0, BLOCK)
    if weight is not None:
        scale = load(weight, c, c < D)[None, :]
        parts, bias_parts = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
    for first in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        outer, within, dense, inside = tile_of(first, rows, INNER, D, ROWS, BLOCK)
        u, dh = load(x, outer * x_outer + within, inside), load(dy, dense, inside)
        if GATE != "none":
            g = load(gate, outer * gate_outer + within, inside)
            opened, slope = activated(g, ACTIVATION)
        if GATE == "first":
            ungated = u
            u *= opened
        if bias is not None:
            u = centred(u, inside, D)
            bias_parts += dh
        r = inverse_root(u, eps, D)
        h = u * r
        if GATE == "last":
            dopened = dh * h
            dh *= opened
        if weight is not None:
            parts += dh * h
            dh *= scale
        if bias is not None:  # the sum below stays the same, since the sum of h is 0
            dh -= (tl.sum(dh, 1) / D)[:, None]
        du = r * (dh - h * (tl.sum(dh * h, 1) / D)[:, None])
        if GATE == "last" and weight is not None:
            dopened *= scale
        if GATE == "first":
            dopened = du * ungated
            du *= opened
        if dtotal is not None:
            du += load(dtotal, dense, inside)
        tl.store(dx + dense, du.to(dx.dtype.element_ty), mask=inside)
        if GATE != "none":
            tl.store(dgate + dense, (dopened * slope).to(dgate.dtype.element_ty), mask=inside)
    if weight is not None:
        at = dweight + tl.program_id(0) * (D if bias is None else 2 * D) + c
        tl.store(at, tl.sum(parts, 0), mask=c < D)
        if bias is not None:
            tl.store(at + D, tl.sum(bias_parts, 0), mask=c < D)
