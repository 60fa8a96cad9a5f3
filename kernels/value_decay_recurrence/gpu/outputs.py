"""One pass over the chunks of a sequence, with a slice of the state in registers.

As in `chunk.py`, moderate decays of a chunk share one reference point per channel. It is 2 to the power of an integer,
so that no bit of an output depends on later tokens. From the first token that has decayed too far from it, a channel is
computed pair by pair.
"""

# Triton kernels: untyped, with branches that are resolved at compile time
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: SIM108

import triton
import triton.language as tl

from ...gpu.tiles import CHUNK, LEAST, LOG2E, exp2, load_tile, pair_of, store_tile

REACH = tl.constexpr(76.0)  # factors up to 2^±76 lose no digits, even in products of three tf32 parts
BEYOND = tl.constexpr(100.0)  # bound that keeps unused factors finite


@triton.jit
def decays(log_decay, t, stride, columns, valid, V: tl.constexpr, BV: tl.constexpr):
    """Return log decays in log2 units."""
    g = load_tile(log_decay, t, stride, columns, valid, V, BV)
    return tl.maximum(g * LOG2E, LEAST)


@triton.jit
def pair_by_pair(A, v, log_decay, t, stride, columns, length, V: tl.constexpr, BV: tl.constexpr):
    """Return Σ_j A_ij exp(b_i − b_j) ⊙ v_j of the chunk at positions t, with each b_i − b_j summed directly."""
    r = tl.arange(0, CHUNK)
    distance = r[:, None] - r[None, :]
    o = tl.zeros([CHUNK, BV], tl.float32)
    between = tl.zeros([CHUNK, BV], tl.float32)
    for s in range(0, CHUNK):
        inside = (r >= s) & (t < length)
        score = tl.sum(tl.where(distance == s, A, 0.0), 1)
        o += score[:, None] * load_tile(v, t - s, stride, columns, inside, V, BV).to(tl.float32) * exp2(between)
        between += decays(log_decay, t - s, stride, columns, inside, V, BV)
    return o


@triton.jit(do_not_specialize=["T"])
def outputs(
    q,  # [tokens,heads,K], like k
    k,
    v,  # [tokens,heads,V], like log_decay and o
    log_decay,
    first,  # [sequences,heads,V,K], like last
    cu_seqlens,  # [sequences+1]
    o,
    last,
    T,
    scale,
    heads: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    slices: tl.constexpr = (V + BV - 1) // BV
    part, n = pair_of(slices * heads)
    h = part // slices
    if cu_seqlens is None:
        start, length = n.to(tl.int64) * T, T
    else:
        start = tl.load(cu_seqlens + n).to(tl.int64)
        length = (tl.load(cu_seqlens + n + 1) - start).to(tl.int32)
    q += (start * heads + h) * K
    k += (start * heads + h) * K
    v += (start * heads + h) * V
    log_decay += (start * heads + h) * V
    o += (start * heads + h) * V
    r, ck, cv = tl.arange(0, CHUNK), tl.arange(0, BK), (part % slices) * BV + tl.arange(0, BV)
    in_state = (cv < V)[:, None] & (ck < K)[None, :]
    state = (n.to(tl.int64) * heads + h) * (V * K) + cv[:, None] * K + ck[None, :]
    if first is None:
        S = tl.zeros([BV, BK], tl.float32)
    else:
        S = tl.load(first + state, mask=in_state, other=0.0)
    for begin in range(0, length, CHUNK):
        t = begin + r
        valid = t < length
        Q = load_tile(q, t, heads * K, ck, valid, K, BK).to(tl.float32) * scale
        Kk = load_tile(k, t, heads * K, ck, valid, K, BK).to(tl.float32)
        Vv = load_tile(v, t, heads * V, cv, valid, V, BV).to(tl.float32)
        g = decays(log_decay, t, heads * V, cv, valid, V, BV)
        if WIDE:
            g = g.to(tl.float64)
        b = tl.cumsum(g, 0)
        total = tl.sum(g, 0)
        A = tl.dot(Q, tl.trans(Kk), input_precision=PRECISION)
        A = tl.where(r[:, None] >= r[None, :], A, 0.0)

        middle = tl.sum(tl.where((r == CHUNK // 2 - 1)[:, None], b, 0.0), 0)
        anchor = tl.maximum(tl.floor(middle + 0.5), -REACH)
        whole = tl.floor(b)
        rest = (b - whole).to(tl.float32)
        shift = tl.minimum(tl.maximum((whole - anchor[None, :]).to(tl.float32), -BEYOND), BEYOND)
        decayed = Vv * (exp2(-rest) * exp2(-shift))
        O = tl.dot(A, decayed, input_precision=PRECISION) * (exp2(rest) * exp2(shift))

        # the test of the first half ignores the anchor, which depends on later tokens
        reach = tl.where((r < CHUNK // 2)[:, None], b, b - anchor[None, :])
        if tl.min(tl.min(reach, 1), 0) < -REACH:
            beyond = tl.cumsum((reach < -REACH).to(tl.int32), 0) > 0
            O = tl.where(beyond, pair_by_pair(A, v, log_decay, t, heads * V, cv, length, V, BV), O)

        O += tl.dot(Q, tl.trans(S), input_precision=PRECISION) * exp2(b.to(tl.float32))
        store_tile(o, t, heads * V, cv, valid, O, V, BV)
        leaving = Vv * exp2((total[None, :] - b).to(tl.float32))
        S = S * exp2(total.to(tl.float32))[:, None]
        S = tl.dot(tl.trans(leaving), Kk, S, input_precision=PRECISION)
    tl.store(last + state, S, mask=in_state)
