"""The part of steep channels in outputs and gradients, which the one pass (`hopper_vector_decay.py`) leaves out.

A program looks at the sums of decays of a few chunks. For those that have a steep channel, it computes what pairs of
tokens inside the chunk contribute in such channels, forward only in the rows that are left out; decays between tokens
come by halves (`gpu/halves.py`).
"""

# Triton kernels: untyped, with branches that are resolved at compile time
# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from ...gpu.halves import LEVELS, factor_at, is_second, places, separated, share_sums
from ...gpu.tiles import CHUNK, LEAST, load_tile, pair_of, store_tile
from .vector_decay import decays

SAFE = tl.constexpr(100.0)  # as in `hopper_vector_decay.py`

GROUP = tl.constexpr(16)  # chunks that a program looks at


@triton.jit
def is_steep(early, late):
    return tl.maximum(-early, -late) > SAFE


@triton.jit
def half_at(ends, place, ck, K: tl.constexpr):
    """Pointers to the sums over the first half of a chunk; those over the second half follow K numbers later."""
    return ends + place * (2 * K) + ck


@triton.jit
def heads_of(n, groups, SUBHEADS: tl.constexpr):
    """The key head and the value head of a recurrence."""
    value_head = n // SUBHEADS
    key_head = (value_head // groups) * SUBHEADS + n % SUBHEADS
    return key_head.to(tl.int64), value_head.to(tl.int64)


@triton.jit
def steep_scores(
    Q, Kk, b, sums, valid, heads, K: tl.constexpr, BK: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores without `scale`, below and on the diagonal."""
    ck = tl.arange(0, BK)
    i, j = places()
    A = tl.where(i == j, tl.sum(Q * Kk, 1)[:, None], 0.0)
    for level in tl.static_range(LEVELS):
        factor, _ = factor_at(sums, b, heads * K, ck, valid, level, K, BK)
        pairs = tl.dot((Q * factor).to(DOT), tl.trans((Kk * factor).to(DOT)), input_precision=PRECISION)
        A += tl.where(separated(level) & (j < i), pairs, 0.0)
    return A


@triton.jit
def steep_gradients(
    D, Q, Kk, b, sums, valid, heads, K: tl.constexpr, BK: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Part of pairs of different tokens in dQ and dK, for D = X + Xᵀ with X = dO Vᵀ below the diagonal."""
    ck = tl.arange(0, BK)
    dQ, dK = tl.zeros([CHUNK, BK], tl.float32), tl.zeros([CHUNK, BK], tl.float32)
    for level in tl.static_range(LEVELS):
        second = is_second(level)[:, None]
        factor, _ = factor_at(sums, b, heads * K, ck, valid, level, K, BK)
        other = (tl.where(second, Q, Kk) * factor).to(DOT)
        pairs = tl.where(separated(level), D, 0.0).to(DOT)
        change = tl.dot(pairs, other, input_precision=PRECISION) * factor
        dQ += tl.where(second, change, 0.0)
        dK += tl.where(second, 0.0, change)
    return dQ, dK


@triton.jit
def which_are_steep(ends, table, n, group, chunks, ck, K: tl.constexpr):
    """1 for each of `GROUP` chunks that has a steep channel; rows of the table may have no tokens."""
    c = group * GROUP + tl.arange(0, GROUP)
    c = tl.where(tl.load(table + c * 2 + 1, mask=c < chunks, other=0) > 0, c, chunks)
    at = ends + ((n.to(tl.int64) * chunks + c) * (2 * K))[:, None] + ck[None, :]
    mask = (c < chunks)[:, None] & (ck < K)[None, :]
    early, late = tl.load(at, mask=mask, other=0.0), tl.load(at + K, mask=mask, other=0.0)
    return tl.max(is_steep(early, late).to(tl.int32), 1)


@triton.jit
def add_tile(x, t, stride, columns, valid, y, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    before = load_tile(x, t, stride, columns, valid, WIDTH, BLOCK).to(tl.float32)
    store_tile(x, t, stride, columns, valid, before + y, WIDTH, BLOCK)


@triton.jit(do_not_specialize=["chunks", "groups"])
def steep_forward(
    q,
    k,
    v,
    log_decay,
    out,  # gets what steep channels add
    ends,
    sums,  # [tokens,heads,K]: memory for sums of decays
    left_out,  # [heads,chunks,K]: for steep channels, the first row that the pass leaves out
    table,  # [chunks,2]: first token, tokens
    scale,
    q_head,
    k_head,
    v_head,
    chunks,
    groups,
    q_token: tl.constexpr,
    k_token: tl.constexpr,
    v_token: tl.constexpr,
    heads: tl.constexpr,
    SUBHEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    group, n = pair_of(tl.cdiv(chunks, GROUP))
    r, ck, cv = tl.arange(0, CHUNK), tl.arange(0, BK), tl.arange(0, BV)
    flags = which_are_steep(ends, table, n, group, chunks, ck, K)
    if tl.max(flags, 0) == 0:
        return
    key_head, value_head = heads_of(n, groups, SUBHEADS)
    for i in range(0, GROUP):
        if tl.sum(tl.where(tl.arange(0, GROUP) == i, flags, 0), 0) > 0:
            c = group * GROUP + i
            place = n.to(tl.int64) * chunks + c
            early = tl.load(half_at(ends, place, ck, K), mask=ck < K, other=0.0)
            steep = is_steep(early, tl.load(half_at(ends, place, ck, K) + K, mask=ck < K, other=0.0))
            start = tl.load(table + c * 2).to(tl.int64)
            length = tl.load(table + c * 2 + 1)
            k_here = k + start * k_token + key_head * k_head
            q_here = q + start * q_token + key_head * q_head
            own = (start * heads + n) * K
            valid = r < length
            first_row = tl.load(left_out + place * K + ck, mask=steep & (ck < K), other=CHUNK)
            served = r[:, None] < first_row[None, :]
            Q = tl.where(served, 0.0, load_tile(q_here, r, q_token, ck, valid, K, BK).to(tl.float32))
            Kk = load_tile(k_here, r, k_token, ck, valid, K, BK).to(tl.float32)
            Z = load_tile(v + start * v_token + value_head * v_head, r, v_token, cv, valid, V, BV)
            g = decays(log_decay + own, r, heads * K, ck, valid, K, BK)
            b = tl.cumsum(g, 0)
            share_sums(sums + own, b, heads * K, ck, valid, K, BK)
            A = steep_scores(Q, Kk, b, sums + own, valid, heads, K, BK, DOT, PRECISION)
            O = tl.dot((A * scale).to(Z.dtype), Z, input_precision=PRECISION)
            add_tile(out + (start * heads + n) * V, r, heads * V, cv, valid, O, V, BV)


@triton.jit(do_not_specialize=["chunks", "groups"])
def steep_backward(
    q,
    k,
    v,
    grad,
    log_decay,
    ends,
    q_grad,  # these get what steep channels add
    k_grad,
    v_grad,
    log_decay_grad,
    sums,
    table,
    scale,
    q_head,
    k_head,
    v_head,
    grad_head,
    chunks,
    groups,
    q_token: tl.constexpr,
    k_token: tl.constexpr,
    v_token: tl.constexpr,
    grad_token: tl.constexpr,
    heads: tl.constexpr,
    SUBHEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    group, n = pair_of(tl.cdiv(chunks, GROUP))
    r, ck, cv = tl.arange(0, CHUNK), tl.arange(0, BK), tl.arange(0, BV)
    flags = which_are_steep(ends, table, n, group, chunks, ck, K)
    if tl.max(flags, 0) == 0:
        return
    key_head, value_head = heads_of(n, groups, SUBHEADS)
    for i in range(0, GROUP):
        if tl.sum(tl.where(tl.arange(0, GROUP) == i, flags, 0), 0) > 0:
            c = group * GROUP + i
            place = n.to(tl.int64) * chunks + c
            early = tl.load(half_at(ends, place, ck, K), mask=ck < K, other=0.0)
            steep = is_steep(early, tl.load(half_at(ends, place, ck, K) + K, mask=ck < K, other=0.0))
            start = tl.load(table + c * 2).to(tl.int64)
            length = tl.load(table + c * 2 + 1)
            q_here = q + start * q_token + key_head * q_head
            k_here = k + start * k_token + key_head * k_head
            own = (start * heads + n) * K
            valid = r < length
            Q = tl.where(steep[None, :], load_tile(q_here, r, q_token, ck, valid, K, BK).to(tl.float32), 0.0)
            Kk = tl.where(steep[None, :], load_tile(k_here, r, k_token, ck, valid, K, BK).to(tl.float32), 0.0)
            Z = load_tile(v + start * v_token + value_head * v_head, r, v_token, cv, valid, V, BV)
            dO = load_tile(grad + start * grad_token + value_head * grad_head, r, grad_token, cv, valid, V, BV)
            g = decays(log_decay + own, r, heads * K, ck, valid, K, BK)
            b = tl.cumsum(g, 0)
            share_sums(sums + own, b, heads * K, ck, valid, K, BK)
            A = steep_scores(Q, Kk, b, sums + own, valid, heads, K, BK, DOT, PRECISION)
            dV = tl.dot(tl.trans((A * scale).to(Z.dtype)), dO, input_precision=PRECISION)
            add_tile(v_grad + (start * heads + n) * V, r, heads * V, cv, valid, dV, V, BV)
            D = tl.dot(dO, tl.trans(Z), input_precision=PRECISION) * scale
            swapped = tl.dot(Z, tl.trans(dO), input_precision=PRECISION) * scale
            D = tl.where(r[:, None] > r[None, :], D, swapped)
            dQ, dK = steep_gradients(D, Q, Kk, b, sums + own, valid, heads, K, BK, DOT, PRECISION)
            dQ, dK = tl.where(steep[None, :], dQ, 0.0), tl.where(steep[None, :], dK, 0.0)
            add_tile(q_grad + own, r, heads * K, ck, valid, dQ, K, BK)
            add_tile(k_grad + own, r, heads * K, ck, valid, dK, K, BK)
            if log_decay_grad is not None:
                after = Q * dQ - Kk * dK
                dg = tl.sum(after, 0)[None, :] - tl.cumsum(after, 0) + after
                at = log_decay_grad + own
                dg += load_tile(at, r, heads * K, ck, valid, K, BK).to(tl.float32)
                dg = tl.where(g <= LEAST, 0.0, dg)  # nothing passes a reset, which makes its channel steep
                store_tile(at, r, heads * K, ck, valid, dg, K, BK)
