"""Gradients of q, k, β and the log decay of the (gated) delta rule: all chunks in parallel, once all states are known.

Letters as in `sequential_pass.py`; S is the state before the chunk, dS the gradient of the state after it:

    X = scale · D ⊙ dO Uᵀ                     M = −D ⊙ dV Uᵀ, strictly lower
    dQ = X K + scale · e^b ⊙ dO Sᵀ            dK = Xᵀ Q + (M + Mᵀ) K + e^{b_C − b} ⊙ U dSᵀ − e^b ⊙ dV Sᵀ
    dβ = Σ_v dV ⊙ U / β²

A log decay g_t scales whatever crosses t: pairs j < t ≤ i inside the chunk (from t on, the part of row i in X K and M K
along q and k, minus the part of column j in Xᵀ Q and Mᵀ K along k), what tokens i ≥ t read from S, what tokens j < t
leave for dS, and the path from S to dS. None of the four is a difference of large numbers, so gradients stay accurate
when a decay erases nearly everything; for that reason the diagonal of X, which no decay scales, is kept separate. The
part of M is summed over M ⊙ K Kᵀ before M is rounded: at β = 2, U alternates and little of these sums is left, so that
rounding M alone would be an error of .01. The sums over t have a separate kernel: on Hopper with Triton 3.6, a draft
that computed them next to the products was wrong. X and M pass from the first kernel to the second through memory for
the same reason: that compiler gets products of a transposed tile wrong, unless the tile was just loaded.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from ...gpu.tiles import CHUNK, LEAST, LOG2E, chunk_at, load_pairs, load_state, load_tokens, store_pairs, store_tokens
from .prepare import nonzero, pair_decay
from .steps import load_last, of_step, store_last


@triton.jit
def of_diagonal(x):
    """The diagonal [64] of a tile [64, 64]."""
    r = tl.arange(0, CHUNK)
    return tl.sum(tl.where(r[:, None] == r[None, :], x, 0.0), 1)


@triton.jit
def gradient_of_queries(
    q,
    k,
    u,
    do,
    dv,
    beta,
    gates,
    states,
    dq,
    dbeta,
    reads,  # X below its diagonal (`writes`: M), for `gradient_of_keys`
    writes,
    diagonal,  # of X
    from_t,
    chunks,
    scale,
    M: tl.constexpr,
    E: tl.constexpr,
    R: tl.constexpr,
    STEPS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    STAGES: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    BLOCKS: tl.constexpr = (K + BK - 1) // BK
    part = tl.program_id(0) % BLOCKS
    chunk, m = tl.program_id(0) // BLOCKS // M, tl.program_id(0) // BLOCKS % M
    token, stop = chunk_at(chunks, chunk)
    keys: tl.constexpr = M // R  # heads of q and k
    values: tl.constexpr = M // E  # and of v
    head = (m // (E * R)) * E + m % E
    tile = chunk.to(tl.int64) * M + m
    r = tl.arange(0, CHUNK)

    X, lower = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    dQ = tl.zeros([CHUNK, BK], tl.float32)
    for column in tl.range(0, V, BV, num_stages=STAGES):
        dO = load_last(do + (m // E) * V, token, stop, values * V, column, V, BV, DTYPE, STEPS)
        U = load_tokens(u + m * V, token, stop, M * V, column, V, BV, DTYPE)
        dV = load_tokens(dv + m * V, token, stop, M * V, column, V, BV, DTYPE)
        S = load_state(states + tile * (K * V), part * BK, column, K, V, BK, BV, DTYPE)
        X = tl.dot(dO, tl.trans(U), X, input_precision=PRECISION)
        lower = tl.dot(dV, tl.trans(U), lower, input_precision=PRECISION)
        dQ = tl.dot(dO, tl.trans(S), dQ, input_precision=PRECISION)
    at = gates + tile * (4 * CHUNK) + r
    D = tl.where(r[:, None] > r[None, :], pair_decay(tl.load(at + 2 * CHUNK), tl.load(at + 3 * CHUNK)), 0.0)
    below = (X * D * scale).to(DTYPE)
    itself = of_diagonal(X) * scale
    if part == 0:
        per_step = token.to(tl.int64) * M + r * M + m
        counts = r < stop - token
        per_write = 1.0 / nonzero(tl.load(beta + per_step, mask=counts, other=1.0).to(tl.float32))
        tl.store(dbeta + per_step, of_diagonal(lower) * per_write * per_write, mask=counts)
        tl.store(diagonal + tile * CHUNK + r, itself)
        store_pairs(reads + tile * (CHUNK * CHUNK), below)
        store_pairs(writes + tile * (CHUNK * CHUNK), -lower * D)
    keys_here = load_tokens(k + head * K, token, stop, keys * K, part * BK, K, BK, DTYPE)
    if from_t is not None:
        lower *= D * tl.dot(keys_here, tl.trans(keys_here), input_precision=PRECISION)
        from_M = tl.sum(lower, 1) - tl.sum(lower, 0)
    dQ *= (tl.load(at) * scale)[:, None]
    dQ = tl.dot(below, keys_here, dQ, input_precision=PRECISION)
    if from_t is not None:
        queries = load_last(q + head * K, token, stop, keys * K, part * BK, K, BK, DTYPE, STEPS)
        tl.store(from_t + (tile * BLOCKS + part) * CHUNK + r, tl.sum(dQ * queries.to(tl.float32), 1) - from_M)
    dQ += itself[:, None] * keys_here.to(tl.float32)
    store_last(dq + m * K, token, stop, M * K, part * BK, K, BK, dQ, STEPS)


@triton.jit
def gradient_of_keys(
    q,
    k,
    u,
    dv,
    gates,
    states,
    dstates,
    reads,
    writes,
    diagonal,
    dk,
    from_t,
    before_t,
    across,
    chunks,
    scale,
    M: tl.constexpr,
    E: tl.constexpr,
    R: tl.constexpr,
    STEPS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    STAGES: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    BLOCKS: tl.constexpr = (K + BK - 1) // BK
    part = tl.program_id(0) % BLOCKS
    chunk, m = tl.program_id(0) // BLOCKS // M, tl.program_id(0) // BLOCKS % M
    token, stop = chunk_at(chunks, chunk)
    keys: tl.constexpr = M // R  # heads of q and k
    head = (m // (E * R)) * E + m % E
    tile = chunk.to(tl.int64) * M + m
    r = tl.arange(0, CHUNK)
    at = gates + tile * (4 * CHUNK)
    dK, from_dS = tl.zeros([CHUNK, BK], tl.float32), tl.zeros([CHUNK, BK], tl.float32)
    way = 0.0
    for column in tl.range(0, V, BV, num_stages=STAGES):
        dV = load_tokens(dv + m * V, token, stop, M * V, column, V, BV, DTYPE)
        U = load_tokens(u + m * V, token, stop, M * V, column, V, BV, DTYPE)
        S = load_state(states + tile * (K * V), part * BK, column, K, V, BK, BV, DTYPE)
        dS = load_state(dstates + tile * (K * V), part * BK, column, K, V, BK, BV, DTYPE)
        dK = tl.dot(dV, tl.trans(S), dK, input_precision=PRECISION)
        from_dS = tl.dot(U, tl.trans(dS), from_dS, input_precision=PRECISION)
        if from_t is not None:
            way += tl.sum(tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1), 0)
    dK *= -tl.load(at + r)[:, None]
    from_dS *= tl.load(at + CHUNK + r)[:, None]
    keys_here = load_tokens(k + head * K, token, stop, keys * K, part * BK, K, BK, DTYPE)
    queries = load_last(q + head * K, token, stop, keys * K, part * BK, K, BK, DTYPE, STEPS)
    written = load_pairs(writes + tile * (CHUNK * CHUNK), DTYPE)
    read = load_pairs(reads + tile * (CHUNK * CHUNK), DTYPE)
    columns = tl.dot(tl.trans(read), queries, input_precision=PRECISION)
    if from_t is not None:
        wide_keys = keys_here.to(tl.float32)
        at_sums = (tile * BLOCKS + part) * CHUNK + r
        tl.store(from_t + at_sums, tl.sum((dK - columns) * wide_keys, 1))
        tl.store(before_t + at_sums, tl.sum(from_dS * wide_keys, 1))
        tl.store(across + tile * BLOCKS + part, way * tl.load(at + (CHUNK - 1)))
    dK += columns + from_dS + tl.load(diagonal + tile * CHUNK + r)[:, None] * queries.to(tl.float32)
    dK = tl.dot(written, keys_here, dK, input_precision=PRECISION)
    dK = tl.dot(tl.trans(written), keys_here, dK, input_precision=PRECISION)
    store_tokens(dk + m * K, token, stop, M * K, part * BK, K, BK, dK)


@triton.jit(do_not_specialize=["M"])
def gradient_of_log_decay(
    dlog_decay,
    log_decay,
    from_queries,
    from_keys,
    before_t,
    across,  # [chunks, M, KEY_PARTS, WAYS]
    chunks,
    M,
    STEPS: tl.constexpr,
    GATE: tl.constexpr,
    QUERY_PARTS: tl.constexpr,
    KEY_PARTS: tl.constexpr,
    WAYS: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    chunk, m = tl.program_id(0) // M, tl.program_id(0) % M
    token, stop = chunk_at(chunks, chunk)
    r = tl.arange(0, CHUNK)
    later, earlier, way = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32), 0.0
    for part in tl.static_range(QUERY_PARTS):
        later += tl.load(from_queries + (tile * QUERY_PARTS + part) * CHUNK + r)
    for part in tl.static_range(KEY_PARTS):
        at = (tile * KEY_PARTS + part) * CHUNK + r
        later += tl.load(from_keys + at)
        earlier += tl.load(before_t + at)
        way += tl.sum(tl.load(across + (tile * KEY_PARTS + part) * WAYS + tl.arange(0, WAYS)), 0)
    token, r_g, valid = of_step(token, r, r < stop - token, 0, STEPS)
    at = token.to(tl.int64) * M + r_g * M + m
    g = tl.load(log_decay + (m + r * 0 if GATE == "constant" else at), mask=valid, other=0.0).to(tl.float32)
    reset = g * LOG2E <= LEAST
    # nothing passes a reset, and what is behind it would only cancel
    number = tl.cumsum(reset.to(tl.int32), 0)
    later = tl.where(number[None, :] == number[:, None], later[None, :], 0.0)
    sums = tl.sum(tl.where(r[None, :] >= r[:, None], later, earlier[None, :]), 1) + way
    tl.store(dlog_decay + at, tl.where(reset, 0.0, sums), mask=valid)
