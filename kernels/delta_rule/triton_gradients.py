"""Gradients of q, k, β and the log decay of the (gated) delta rule: every chunk by itself, once all states are known.

Letters as in `triton_scan.py`; S is the state before the chunk, dS the gradient of the state after it:

    X = scale · D ⊙ dO Uᵀ                     M = −strict lower(D ⊙ dV Uᵀ)
    dQ = X K + scale · e^b ⊙ dO Sᵀ            dK = Xᵀ Q + (M + Mᵀ) K + e^{b_C − b} ⊙ U dSᵀ − e^b ⊙ dV Sᵀ
    dβ = Σ_v dV ⊙ U / β²

A log decay g_t scales whatever goes past t: pairs j < t ≤ i inside the chunk (row minus column sums of X ⊙ Q Kᵀ and
M ⊙ K Kᵀ, from t on), what tokens i ≥ t read from S, what tokens j < t left for dS, and the way from S to dS. None of
the four is a difference of large numbers, so gradients stay right when a decay erases nearly everything. Their sums
over t have a kernel of their own: on Hopper with triton 3.6, a draft that took them beside the products was wrong.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from .triton_prepare import nonzero
from .triton_tiles import C, chunk_bounds, load_pairs, load_state, load_tokens, pair_decay, store_tokens


@triton.jit(do_not_specialize=["sequences", "T", "M", "E", "R"])
def gradient_of_queries(
    q,
    k,
    u,
    do,
    scores,
    gates,
    states,
    dq,
    from_t,
    cu_seqlens,
    scale,
    sequences,
    T,
    M,
    E,
    R,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    PACKED: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    BLOCKS: tl.constexpr = (K + BK - 1) // BK
    part = tl.program_id(0) % BLOCKS
    slot, m = tl.program_id(0) // BLOCKS // M, tl.program_id(0) // BLOCKS % M
    token, stop = chunk_bounds(slot, cu_seqlens, sequences, T, PACKED)
    if token >= stop:
        return
    keys, values = M // R, M // E  # heads of q and k, and of v
    head = (m // (E * R)) * E + m % E
    tile = slot.to(tl.int64) * M + m
    r = tl.arange(0, C)

    X = tl.zeros([C, C], tl.float32)
    dQ = tl.zeros([C, BK], tl.float32)
    for column in tl.range(0, V, BV, num_stages=STAGES):
        dO = load_tokens(do + (m // E) * V, token, stop, values * V, column, V, BV, DTYPE)
        U = load_tokens(u + m * V, token, stop, M * V, column, V, BV, DTYPE)
        X = tl.dot(dO, tl.trans(U), X, input_precision=PRECISION)
        S = load_state(states + tile * (K * V), part * BK, column, K, V, BK, BV, DTYPE)
        dQ = tl.dot(dO, tl.trans(S), dQ, input_precision=PRECISION)
    at = gates + tile * (4 * C) + r
    if GATED:
        # each part has all of the pairs: one of them counts
        counts = (r[:, None] > r[None, :]) & (part == 0)
        pairs = tl.where(counts, X * load_pairs(scores + tile * (C * C), tl.float32), 0.0)
        rows = tl.sum(pairs, 1)
        at_sums = from_t + (tile * BLOCKS + part) * (2 * C) + r
        tl.store(at_sums + C, tl.sum(pairs, 0))
    D = pair_decay(tl.load(at + 2 * C), tl.load(at + 3 * C))
    scored = tl.where(r[:, None] >= r[None, :], X * D * scale, 0.0).to(DTYPE)
    dQ *= (tl.load(at) * scale)[:, None]
    if GATED:
        queries = load_tokens(q + head * K, token, stop, keys * K, part * BK, K, BK, DTYPE)
        tl.store(at_sums, rows + tl.sum(dQ * queries.to(tl.float32), 1))
    keys_here = load_tokens(k + head * K, token, stop, keys * K, part * BK, K, BK, DTYPE)
    dQ = tl.dot(scored, keys_here, dQ, input_precision=PRECISION)
    store_tokens(dq + m * K, token, stop, M * K, part * BK, K, BK, dQ)


@triton.jit(do_not_specialize=["sequences", "T", "M", "E", "R"])
def gradient_of_keys(
    q,
    k,
    u,
    do,
    dv,
    beta,
    gates,
    states,
    dstates,
    dk,
    dbeta,
    from_t,
    before_t,
    across,
    cu_seqlens,
    scale,
    sequences,
    T,
    M,
    E,
    R,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    PACKED: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    BLOCKS: tl.constexpr = (K + BK - 1) // BK
    part = tl.program_id(0) % BLOCKS
    slot, m = tl.program_id(0) // BLOCKS // M, tl.program_id(0) // BLOCKS % M
    token, stop = chunk_bounds(slot, cu_seqlens, sequences, T, PACKED)
    if token >= stop:
        return
    keys, values = M // R, M // E  # heads of q and k, and of v
    head = (m // (E * R)) * E + m % E
    u += m * V
    dv += m * V
    tile = slot.to(tl.int64) * M + m
    r = tl.arange(0, C)
    at = gates + tile * (4 * C)
    from_S, from_dS = tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32)
    lower, upper, X = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    way = 0.0
    for column in tl.range(0, V, BV, num_stages=STAGES):
        dV = load_tokens(dv, token, stop, M * V, column, V, BV, DTYPE)
        U = load_tokens(u, token, stop, M * V, column, V, BV, DTYPE)
        dO = load_tokens(do + (m // E) * V, token, stop, values * V, column, V, BV, DTYPE)
        S = load_state(states + tile * (K * V), part * BK, column, K, V, BK, BV, DTYPE)
        dS = load_state(dstates + tile * (K * V), part * BK, column, K, V, BK, BV, DTYPE)
        lower = tl.dot(dV, tl.trans(U), lower, input_precision=PRECISION)
        # not the transpose of the former: on Hopper, triton 3.6 multiplies transposed products wrongly
        upper = tl.dot(U, tl.trans(dV), upper, input_precision=PRECISION)
        X = tl.dot(U, tl.trans(dO), X, input_precision=PRECISION)
        from_S = tl.dot(dV, tl.trans(S), from_S, input_precision=PRECISION)
        from_dS = tl.dot(U, tl.trans(dS), from_dS, input_precision=PRECISION)
        if GATED:
            way += tl.sum(tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1), 0)

    per_step = token.to(tl.int64) * M + r * M + m
    counts = (r < stop - token) & (part == 0)
    per_write = 1.0 / nonzero(tl.load(beta + per_step, mask=counts, other=1.0).to(tl.float32))
    products = tl.sum(tl.where(r[:, None] == r[None, :], lower, 0.0), 1)
    tl.store(dbeta + per_step, products * per_write * per_write, mask=counts)

    D = pair_decay(tl.load(at + 2 * C + r), tl.load(at + 3 * C + r))
    scored = tl.where(r[:, None] <= r[None, :], X * D * scale, 0.0).to(DTYPE)
    lower = tl.where(r[:, None] > r[None, :], -lower * D, 0.0)
    solved = (lower + tl.where(r[:, None] < r[None, :], -upper * D, 0.0)).to(DTYPE)
    from_S *= -tl.load(at + r)[:, None]
    from_dS *= tl.load(at + C + r)[:, None]
    keys_here = load_tokens(k + head * K, token, stop, keys * K, part * BK, K, BK, DTYPE)
    if GATED:
        at_sums = from_t + (tile * BLOCKS + part) * (2 * C) + r
        wide_keys = keys_here.to(tl.float32)
        tl.store(before_t + (tile * BLOCKS + part) * C + r, tl.sum(from_dS * wide_keys, 1))
        rows = tl.sum(from_S * wide_keys, 1)
        pairs = tl.dot(keys_here, tl.trans(keys_here), input_precision=PRECISION) * lower
        tl.store(at_sums, rows + tl.sum(pairs, 1))
        tl.store(at_sums + C, tl.sum(pairs, 0))
        total = tl.load(at + (C - 1))
        tl.store(across + tile * BLOCKS + part, way * total)
    dK = tl.dot(solved, keys_here, from_S + from_dS, input_precision=PRECISION)
    queries = load_tokens(q + head * K, token, stop, keys * K, part * BK, K, BK, DTYPE)
    dK = tl.dot(scored, queries, dK, input_precision=PRECISION)
    store_tokens(dk + m * K, token, stop, M * K, part * BK, K, BK, dK)


@triton.jit(do_not_specialize=["sequences", "T", "M"])
def gradient_of_log_decay(
    from_queries,
    from_keys,
    before_t,
    across,
    dlog_decay,
    cu_seqlens,
    sequences,
    T,
    M,
    QUERY_PARTS: tl.constexpr,
    KEY_PARTS: tl.constexpr,
    PACKED: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    slot, m = tl.program_id(0) // M, tl.program_id(0) % M
    token, stop = chunk_bounds(slot, cu_seqlens, sequences, T, PACKED)
    if token >= stop:
        return
    r = tl.arange(0, C)
    later, earlier, way = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32), 0.0
    for part in tl.static_range(QUERY_PARTS):
        at = from_queries + (tile * QUERY_PARTS + part) * (2 * C) + r
        later += tl.load(at) - tl.load(at + C)
    for part in tl.static_range(KEY_PARTS):
        at = from_keys + (tile * KEY_PARTS + part) * (2 * C) + r
        later += tl.load(at) - tl.load(at + C)
        earlier += tl.load(before_t + (tile * KEY_PARTS + part) * C + r)
        way += tl.load(across + tile * KEY_PARTS + part)
    sums = tl.sum(tl.where(r[None, :] >= r[:, None], later[None, :], earlier[None, :]), 1) + way
    tl.store(dlog_decay + token.to(tl.int64) * M + r * M + m, sums, mask=r < stop - token)
