"""The parts of a chunk in parallel, as in `prepare.py` and `gradients.py`, for one decay per head, or none.

The factor between two tokens is then one number for all channels, D_ij = e^{b_i − b_j}. It multiplies their product
after it was computed, for decays of any strength: P = scale · D ⊙ Q Kᵀ, L = D ⊙ A Kᵀ. `pairs` stores the gradients of
Q Kᵀ and A Kᵀ, so that the gradients of keys and queries are products with what was loaded.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: SIM108

import triton
import triton.language as tl

from ....gpu.tiles import (
    CHUNK,
    LEAST,
    LOG2E,
    chunk_at,
    exp2,
    load_pairs,
    load_state,
    load_tokens,
    store_pairs,
    store_tokens,
)
from ..prepare import unit_lower_inverse
from ..steps import load_last, of_step, store_last
from .decays import strength_of


@triton.jit
def summed(log_decay, token, valid, m, M: tl.constexpr, GATE: tl.constexpr, STEPS: tl.constexpr):
    """The log2 decays of the rows of a chunk, and their sums, in fp64."""
    token, r, valid = of_step(token, tl.arange(0, CHUNK), valid, 0, STEPS)
    if GATE == "none":
        g = tl.zeros([CHUNK], tl.float64)
    elif GATE == "constant":
        g = tl.where(valid, tl.load(log_decay + m).to(tl.float64) * LOG2E, 0.0)
    else:
        g = tl.load(log_decay + token.to(tl.int64) * M + m + r * M, mask=valid, other=0.0).to(tl.float64) * LOG2E
    g = tl.maximum(g, LEAST)
    return g, tl.cumsum(g, 0)


@triton.jit
def between(later, earlier):
    """2^(later_i − earlier_j) [64,64] for sums in fp64, at most 1: what is above it is not used.

    As sums of two fp32 numbers, the differences of sums in the thousands keep their digits.
    """
    high, other = later.to(tl.float32), earlier.to(tl.float32)
    low, rest = (later - high.to(tl.float64)).to(tl.float32), (earlier - other.to(tl.float64)).to(tl.float32)
    difference = (high[:, None] - other[None, :]) + (low[:, None] - rest[None, :])
    return exp2(tl.minimum(difference, 0.0))


@triton.jit(do_not_specialize=["scale"])
def scalar_prepare(
    q,
    k,
    erase,
    beta,
    log_decay,
    inverse,
    scores,
    read_q,
    read_a,
    keep,
    total,
    chunks,
    scale,
    M: tl.constexpr,
    E: tl.constexpr,
    R: tl.constexpr,
    STEPS: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    GATE: tl.constexpr,
    BEFORE: tl.constexpr,
    PRODUCT: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    MERGE: tl.constexpr,
):
    m = tl.program_id(0) % M
    tile = tl.program_id(0).to(tl.int64)
    token, stop = chunk_at(chunks, tl.program_id(0) // M)
    keys: tl.constexpr = M // R  # heads of q and k
    head = (m // (E * R)) * E + m % E
    r = tl.arange(0, CHUNK)
    valid = r < stop - token
    g, b = summed(log_decay, token, valid, m, M, GATE, STEPS)
    last = tl.sum(g, 0)
    write = strength_of(beta, token, valid, m, M)
    read = b - g if BEFORE else b
    of_q, of_a = exp2(b.to(tl.float32)) * scale, exp2(read.to(tl.float32))
    left = exp2((last - b).to(tl.float32))
    P, L = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    for column in tl.static_range(0, K, BK):
        ck = column + tl.arange(0, BK)
        Q = load_last(q + head * K, token, stop, keys * K, column, K, BK, DOT, STEPS)
        Kk = load_tokens(k + head * K, token, stop, keys * K, column, K, BK, DOT)
        P = tl.dot(Q, tl.trans(Kk), P, input_precision=PRECISION)
        if erase is None:
            A = Kk
            L = tl.dot(Kk, tl.trans(Kk), L, input_precision=PRECISION)
        else:
            A = load_tokens(erase + m * K, token, stop, M * K, column, K, BK, DOT)
            if PRODUCT:
                A = (A.to(tl.float32) * Kk.to(tl.float32)).to(DOT)
            L = tl.dot(A, tl.trans(Kk), L, input_precision=PRECISION)
        store_last(read_q + m * K, token, stop, M * K, column, K, BK, Q.to(tl.float32) * of_q[:, None], STEPS)
        store_tokens(read_a + m * K, token, stop, M * K, column, K, BK, A.to(tl.float32) * (of_a * write)[:, None])
        store_tokens(keep + m * K, token, stop, M * K, column, K, BK, Kk.to(tl.float32) * left[:, None])
        whole = tl.zeros([BK], tl.float32) + exp2(last.to(tl.float32))
        tl.store(total + tile * K + ck, whole, mask=ck < K)
    D = between(b, b)
    P = tl.where(r[:, None] >= r[None, :], P * D * scale, 0.0)
    if BEFORE:
        D = between(read, b)
    L = tl.where(r[:, None] > r[None, :], L * D * write[:, None], 0.0)
    solve = unit_lower_inverse(L, MERGE)
    store_pairs(inverse + tile * (CHUNK * CHUNK), solve)
    store_pairs(scores + tile * (CHUNK * CHUNK), tl.dot(P, solve, input_precision=MERGE))


@triton.jit(do_not_specialize=["scale", "rows"])
def scalar_gradients(
    q,
    k,
    erase,
    beta,
    log_decay,
    do,
    u,
    dr,
    states,
    dstates,
    dP,  # of Q Kᵀ, below the diagonal
    dL,  # of A Kᵀ
    diagonal,
    dq,
    dk,
    derase,
    dbeta,  # [blocks of keys,rows,M]
    dg,  # [blocks of keys,tokens,M]
    chunks,
    scale,
    rows,
    M: tl.constexpr,
    E: tl.constexpr,
    R: tl.constexpr,
    STEPS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GATE: tl.constexpr,
    BEFORE: tl.constexpr,
    PRODUCT: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    BLOCKS: tl.constexpr = (K + BK - 1) // BK
    part = tl.program_id(0) % BLOCKS
    chunk, m = tl.program_id(0) // BLOCKS // M, tl.program_id(0) // BLOCKS % M
    tile = chunk.to(tl.int64) * M + m
    token, stop = chunk_at(chunks, chunk)
    keys: tl.constexpr = M // R
    values: tl.constexpr = M // E
    head = (m // (E * R)) * E + m % E
    column = part * BK
    r = tl.arange(0, CHUNK)
    valid = r < stop - token
    per_step = token.to(tl.int64) * M + m + r * M

    from_q, from_a = tl.zeros([CHUNK, BK], tl.float32), tl.zeros([CHUNK, BK], tl.float32)
    kept, through = tl.zeros([CHUNK, BK], tl.float32), tl.zeros([BK], tl.float32)
    for value in tl.range(0, V, BV, num_stages=STAGES):
        S = load_state(states + tile * (K * V), value, column, V, K, BV, BK, DOT)
        dS = load_state(dstates + tile * (K * V), value, column, V, K, BV, BK, DOT)
        dO = load_last(do + (m // E) * V, token, stop, values * V, value, V, BV, DOT, STEPS)
        dR = load_tokens(dr + m * V, token, stop, M * V, value, V, BV, DOT)
        U = load_tokens(u + m * V, token, stop, M * V, value, V, BV, DOT)
        from_q = tl.dot(dO, S, from_q, input_precision=PRECISION)
        from_a = tl.dot(dR, S, from_a, input_precision=PRECISION)
        kept = tl.dot(U, dS, kept, input_precision=PRECISION)
        through += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 0)

    g, b = summed(log_decay, token, valid, m, M, GATE, STEPS)
    last = tl.sum(g, 0)
    read = b - g if BEFORE else b
    Q = load_last(q + head * K, token, stop, keys * K, column, K, BK, DOT, STEPS)
    Kk = load_tokens(k + head * K, token, stop, keys * K, column, K, BK, DOT)
    write = strength_of(beta, token, valid, m, M)
    if erase is None:
        erased_by = Kk
    else:
        erased_by = load_tokens(erase + m * K, token, stop, M * K, column, K, BK, DOT)
    A = erased_by
    if PRODUCT:
        A = (A.to(tl.float32) * Kk.to(tl.float32)).to(DOT)
    if beta is not None:
        A = (A.to(tl.float32) * write[:, None]).to(DOT)
    P, L = load_pairs(dP + tile * (CHUNK * CHUNK), DOT), load_pairs(dL + tile * (CHUNK * CHUNK), DOT)
    dQ = tl.dot(P, Kk, from_q * (exp2(b.to(tl.float32)) * scale)[:, None], input_precision=PRECISION)
    dA = tl.dot(L, Kk, from_a * -exp2(read.to(tl.float32))[:, None], input_precision=PRECISION)
    dK = tl.dot(tl.trans(P), Q, input_precision=PRECISION)
    dK = tl.dot(tl.trans(L), A, dK, input_precision=PRECISION)
    kept *= exp2((last - b).to(tl.float32))[:, None]
    if dg is not None:
        # as in `gradients.py`: sums of one sign, not differences
        erased = tl.sum(A.to(tl.float32) * dA, 1)
        after = tl.sum(Q.to(tl.float32) * dQ - Kk.to(tl.float32) * dK, 1) + erased
        change = tl.sum(Kk.to(tl.float32) * kept, 1) - after
        passed = tl.sum(after, 0) + tl.sum(through, 0) * exp2(last.to(tl.float32))
        dG = tl.cumsum(change, 0) - change + passed
        if BEFORE:
            dG -= erased
        dG = tl.where(g <= LEAST, 0.0, dG)  # nothing passes a reset
        first, g_rows, is_first = of_step(token, r, valid, 0, STEPS)
        at = part.to(tl.int64) * (rows // STEPS) * M + (first.to(tl.int64) * M + m + g_rows * M)
        tl.store(dg + at, dG, mask=is_first)
    itself = tl.load(diagonal + tile * CHUNK + r)[:, None]
    dQ += itself * Kk.to(tl.float32)
    dK += kept + itself * Q.to(tl.float32)
    if beta is not None:
        strength = tl.sum(erased_by.to(tl.float32) * dA, 1)
        tl.store(dbeta + part.to(tl.int64) * rows * M + per_step, strength, mask=valid)
        dA *= write[:, None]
    if PRODUCT:
        dK += dA * erased_by.to(tl.float32)
        dA *= Kk.to(tl.float32)
    if erase is None:
        dK += dA
    else:
        store_tokens(derase + m * K, token, stop, M * K, column, K, BK, dA)
    store_last(dq + m * K, token, stop, M * K, column, K, BK, dQ, STEPS)
    store_tokens(dk + m * K, token, stop, M * K, column, K, BK, dK)
