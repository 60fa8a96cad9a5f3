"""Decays per key channel: the work that is done chunk by chunk, before and after the sequential passes.

A_ij = Σ_k q_ik k_jk exp(b_ik − b_jk), j ≤ i, with the decays between tokens by halves (`gpu/halves.py`).
"""

# Triton kernels: untyped, with branches that are resolved at compile time
# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from ...gpu.halves import LEVELS, factor_at, is_second, load_symmetric, places, separated, share_sums
from ...gpu.tiles import CHUNK, LEAST, LOG2E, exp2, load_tile, pair_of, store_tile


@triton.jit
def decays(log_decay, t, stride, columns, valid, K: tl.constexpr, BK: tl.constexpr):
    g = load_tile(log_decay, t, stride, columns, valid, K, BK).to(tl.float32)
    return tl.maximum(g * LOG2E, LEAST)


@triton.jit(do_not_specialize=["chunks", "groups"])
def channel_scores(
    q,  # [tokens,·,K], like k
    k,
    log_decay,  # [tokens,heads,K]
    beta,  # [tokens,heads]
    scores,  # [heads,chunks,64,64]
    entering,  # [tokens,heads,K]: scale · q e^b
    leaving,  # β k e^{b_C − b}
    total,  # [heads,chunks,K]: e^{b_C}
    sums,  # [tokens,heads,K]: memory for sums of decays
    table,  # [chunks,2]: first token, tokens
    scale,
    q_head,
    k_head,
    chunks,
    groups,
    q_token: tl.constexpr,
    k_token: tl.constexpr,
    heads: tl.constexpr,
    SUBHEADS: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    WIDE: tl.constexpr,
    DOT: tl.constexpr,  # dtype of the factors
    PRECISION: tl.constexpr,
):
    c, n = pair_of(chunks)
    start = tl.load(table + c * 2).to(tl.int64)
    count = tl.load(table + c * 2 + 1)
    value_head = n // SUBHEADS
    key_head = (value_head // groups) * SUBHEADS + n % SUBHEADS
    place = n.to(tl.int64) * chunks + c
    q += start * q_token + key_head.to(tl.int64) * q_head
    k += start * k_token + key_head.to(tl.int64) * k_head
    own = (start * heads + n) * K  # offset in tensors [tokens,heads,K]
    r = tl.arange(0, CHUNK)
    valid = r < count
    if beta is not None:
        input_gate = tl.load(beta + (start + r) * heads + n, mask=valid, other=0.0)
    else:
        input_gate = tl.full([CHUNK], 1.0, tl.float32)
    i, j = places()
    A = tl.zeros([CHUNK, CHUNK], tl.float32)
    for first in range(0, K, BK):
        ck = first + tl.arange(0, BK)
        Q = load_tile(q, r, q_token, ck, valid, K, BK).to(tl.float32)
        Kk = load_tile(k, r, k_token, ck, valid, K, BK).to(tl.float32)
        g = decays(log_decay + own, r, heads * K, ck, valid, K, BK)
        if WIDE:
            g = g.to(tl.float64)
        b, last = tl.cumsum(g, 0), tl.sum(g, 0)
        share_sums(sums + own, b, heads * K, ck, valid, K, BK)
        e = exp2(b.to(tl.float32))
        w = exp2(tl.minimum((last[None, :] - b).to(tl.float32), 0.0)) * input_gate[:, None]
        store_tile(entering + own, r, heads * K, ck, valid, Q * e * scale, K, BK)
        store_tile(leaving + own, r, heads * K, ck, valid, Kk * w, K, BK)
        tl.store(total + place * K + ck, exp2(last.to(tl.float32)), mask=ck < K)
        A += tl.where(i == j, tl.sum(Q * Kk, 1)[:, None], 0.0)
        for level in tl.static_range(LEVELS):
            factor, _ = factor_at(sums + own, b, heads * K, ck, valid, level, K, BK)
            earlier = tl.trans((Kk * factor).to(DOT))
            pairs = tl.dot((Q * factor).to(DOT), earlier, input_precision=PRECISION)
            A += tl.where(separated(level) & (j < i), pairs, 0.0)
    A *= scale * input_gate[None, :]
    tl.store(scores + place * (CHUNK * CHUNK) + i * CHUNK + j, A.to(scores.dtype.element_ty))


@triton.jit(do_not_specialize=["chunks"])
def channel_score_grads(
    v,  # [tokens,heads,V], like grad
    grad,
    score_grads,  # [heads,chunks,64,64]: scale · dO Vᵀ below the diagonal
    diagonal,  # [heads,chunks,64]: … and on the diagonal
    table,
    scale,
    v_head,
    grad_head,
    chunks,
    v_token: tl.constexpr,
    grad_token: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    c, h = pair_of(chunks)
    start = tl.load(table + c * 2).to(tl.int64)
    place = h.to(tl.int64) * chunks + c
    r = tl.arange(0, CHUNK)
    valid = r < tl.load(table + c * 2 + 1)
    cv = tl.arange(0, BV)
    dO = load_tile(grad + start * grad_token + h.to(tl.int64) * grad_head, r, grad_token, cv, valid, V, BV)
    Vv = load_tile(v + start * v_token + h.to(tl.int64) * v_head, r, v_token, cv, valid, V, BV)
    D = tl.dot(dO, tl.trans(Vv), input_precision=PRECISION) * scale
    distance = r[:, None] - r[None, :]
    # a token paired with itself does not decay: these pairs stay out of the terms that have to cancel
    tl.store(diagonal + place * CHUNK + r, tl.sum(tl.where(distance == 0, D, 0.0), 1))
    tile = place * (CHUNK * CHUNK) + r[:, None] * CHUNK + r[None, :]
    tl.store(score_grads + tile, tl.where(distance > 0, D, 0.0).to(score_grads.dtype.element_ty))


@triton.jit(do_not_specialize=["chunks", "groups", "tokens"])
def channel_grads(
    q,
    k,
    score_grads,  # per value head
    diagonal,
    log_decay,
    beta,
    read,  # [tokens,heads,K]: dO Sᵀ
    written,  # V dSᵀ
    anchors,  # [heads,chunks,K]: rows of S before the chunk ⊙ its gradient after the chunk
    q_grad,  # [tokens,heads,K], like k_grad and log_decay_grad
    k_grad,
    log_decay_grad,
    beta_grad,  # [key slices,tokens,heads]
    sums,  # [tokens,heads,K]: memory for sums of decays
    table,
    scale,
    q_head,
    k_head,
    tokens,
    chunks,
    groups,
    q_token: tl.constexpr,
    k_token: tl.constexpr,
    heads: tl.constexpr,
    SUBHEADS: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    WIDE: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    slices = (K + BK - 1) // BK
    part, n = pair_of(chunks * slices)
    slice_, c = part % slices, part // slices
    start = tl.load(table + c * 2).to(tl.int64)
    count = tl.load(table + c * 2 + 1)
    value_head = n // SUBHEADS
    key_head = (value_head // groups) * SUBHEADS + n % SUBHEADS
    place = n.to(tl.int64) * chunks + c
    q += start * q_token + key_head.to(tl.int64) * q_head
    k += start * k_token + key_head.to(tl.int64) * k_head
    own = (start * heads + n) * K
    r = tl.arange(0, CHUNK)
    valid = r < count
    if beta is not None:
        input_gate = tl.load(beta + (start + r) * heads + n, mask=valid, other=0.0)
    else:
        input_gate = tl.full([CHUNK], 1.0, tl.float32)

    of_head = value_head.to(tl.int64) * chunks + c
    D = load_symmetric(score_grads + of_head * (CHUNK * CHUNK))
    on_diagonal = tl.load(diagonal + of_head * CHUNK + r)

    ck = slice_ * BK + tl.arange(0, BK)
    Q = load_tile(q, r, q_token, ck, valid, K, BK).to(tl.float32)
    Kk = load_tile(k, r, k_token, ck, valid, K, BK).to(tl.float32)
    gated = Kk * input_gate[:, None]
    g = decays(log_decay + own, r, heads * K, ck, valid, K, BK)
    if WIDE:
        g = g.to(tl.float64)
    b, last = tl.cumsum(g, 0), tl.sum(g, 0)
    share_sums(sums + own, b, heads * K, ck, valid, K, BK)
    dQ, dK = tl.zeros([CHUNK, BK], tl.float32), tl.zeros([CHUNK, BK], tl.float32)
    for level in tl.static_range(LEVELS):
        second = is_second(level)[:, None]
        factor, _ = factor_at(sums + own, b, heads * K, ck, valid, level, K, BK)
        # one product for the queries of second halves and the keys of first halves
        other = (tl.where(second, Q, gated) * factor).to(DOT)
        pairs = tl.where(separated(level), D, 0.0).to(DOT)
        change = tl.dot(pairs, other, input_precision=PRECISION) * factor
        dQ += tl.where(second, change, 0.0)
        dK += tl.where(second, 0.0, change)

    from_state = load_tile(read + own, r, heads * K, ck, valid, K, BK).to(tl.float32)
    to_state = load_tile(written + own, r, heads * K, ck, valid, K, BK).to(tl.float32)
    from_state = from_state * exp2(b.to(tl.float32)) * scale
    to_state = to_state * exp2(tl.minimum((last[None, :] - b).to(tl.float32), 0.0))
    if log_decay_grad is not None:
        # later tokens reach back past this one, earlier ones forward: sums of one sign, not differences
        after = Q * (from_state + dQ) - gated * dK
        before = gated * to_state
        through = tl.load(anchors + place * K + ck, mask=ck < K, other=0.0) * exp2(last.to(tl.float32))
        i, j = places()
        dg = tl.dot((j < i).to(DOT), before.to(DOT), input_precision=PRECISION)
        dg += tl.cumsum(after, 0, reverse=True) + through[None, :]
        dg = tl.where(g <= LEAST, 0.0, dg)  # nothing passes a reset
        store_tile(log_decay_grad + own, r, heads * K, ck, valid, dg, K, BK)
    dQ += from_state + on_diagonal[:, None] * gated
    dK += to_state + on_diagonal[:, None] * Q
    store_tile(q_grad + own, r, heads * K, ck, valid, dQ, K, BK)
    store_tile(k_grad + own, r, heads * K, ck, valid, dK * input_gate[:, None], K, BK)
    if beta_grad is not None:
        at = slice_.to(tl.int64) * tokens * heads + (start + r) * heads + n
        tl.store(beta_grad + at, tl.sum(Kk * dK, 1), mask=valid)
