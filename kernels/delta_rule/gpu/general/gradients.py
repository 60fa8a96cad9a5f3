"""Gradients of all arguments: all chunks in parallel, once all states and their gradients are known.

Letters as in `chunk_general.py`; S is the state before the chunk, dS the gradient of the state after it. `pairs` stores
the gradients of P and L and what follows from the values alone; `gradients` computes the rest for a block of keys.
Pairs pass through memory because Triton 3.6 on Hopper gets products of a transposed tile wrong, unless it was loaded.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: SIM108

import triton
import triton.language as tl

from ....gpu.halves import LEVELS, factor_at, is_second, load_symmetric, places, separated, share_sums
from ....gpu.tiles import (
    CHUNK,
    LEAST,
    chunk_at,
    exp2,
    load_state,
    load_tile,
    load_tokens,
    store_pairs,
    store_tile,
    store_tokens,
)
from ..steps import load_last, of_step
from .decays import decays_of, strength_of
from .scalar_decay import between, summed


@triton.jit(do_not_specialize=["scale"])
def pairs(
    v,
    beta,
    log_decay,  # one per head
    do,
    u,
    dr,
    dv,  # [rows,M,V]
    dbeta,  # [rows,M]: the part of the values
    dP,  # [chunks,M,64,64]: below the diagonal; with one decay per head, of the products that D multiplies
    dL,
    diagonal,  # [chunks,M,64]: of dP
    chunks,
    scale,
    M: tl.constexpr,
    E: tl.constexpr,
    STEPS: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    GATE: tl.constexpr,
    BEFORE: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    m = tl.program_id(0) % M
    tile = tl.program_id(0).to(tl.int64)
    token, stop = chunk_at(chunks, tl.program_id(0) // M)
    values: tl.constexpr = M // E
    r = tl.arange(0, CHUNK)
    valid = r < stop - token
    distance = r[:, None] - r[None, :]
    write = strength_of(beta, token, valid, m, M)
    P, L = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    from_values = tl.zeros([CHUNK], tl.float32)
    for column in range(0, V, BV):
        dO = load_last(do + (m // E) * V, token, stop, values * V, column, V, BV, DTYPE, STEPS)
        U = load_tokens(u + m * V, token, stop, M * V, column, V, BV, DTYPE)
        dR = load_tokens(dr + m * V, token, stop, M * V, column, V, BV, DTYPE)
        P = tl.dot(dO, tl.trans(U), P, input_precision=PRECISION)
        L = tl.dot(dR, tl.trans(U), L, input_precision=PRECISION)
        if beta is not None:
            Vv = load_tokens(v + (m // E) * V, token, stop, values * V, column, V, BV, tl.float32)
            from_values += tl.sum(Vv * dR.to(tl.float32), 1)
            store_tokens(dv + m * V, token, stop, M * V, column, V, BV, dR.to(tl.float32) * write[:, None])
    P *= scale
    tl.store(diagonal + tile * CHUNK + r, tl.sum(tl.where(distance == 0, P, 0.0), 1))
    if GATE != "channel":
        g, b = summed(log_decay, token, valid, m, M, GATE, STEPS)
        D = between(b, b)
        P *= D
        if BEFORE:
            D = between(b - g, b)
        L *= D
    store_pairs(dP + tile * (CHUNK * CHUNK), tl.where(distance > 0, P, 0.0))
    store_pairs(dL + tile * (CHUNK * CHUNK), tl.where(distance > 0, -L, 0.0))
    if beta is not None:
        tl.store(dbeta + token.to(tl.int64) * M + m + r * M, from_values, mask=valid)


@triton.jit(do_not_specialize=["scale", "rows"])
def gradients(
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
    dP,
    dL,
    diagonal,
    dq,  # [tokens,M,K], like dg
    dk,  # [rows,M,K], like derase
    derase,  # if there are erase keys
    dbeta,  # [blocks of keys,rows,M] if there is β: the part of the keys
    dg,
    sums,  # [rows,M,K]: memory for sums of decays
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
    BEFORE: tl.constexpr,
    PRODUCT: tl.constexpr,
    WIDE: tl.constexpr,
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
    r = tl.arange(0, CHUNK)
    count = stop - token
    valid = r < count
    start = token.to(tl.int64)
    token_q, q_rows, is_read = of_step(token, r, valid, STEPS - 1, STEPS)
    start_q = token_q.to(tl.int64)
    q += (start_q * keys + head) * K
    k += (start * keys + head) * K
    own, own_q = (start * M + m) * K, (start_q * M + m) * K
    ck = part * BK + tl.arange(0, BK)

    from_q, from_a = tl.zeros([CHUNK, BK], tl.float32), tl.zeros([CHUNK, BK], tl.float32)
    kept, through = tl.zeros([CHUNK, BK], tl.float32), tl.zeros([BK], tl.float32)
    for column in tl.range(0, V, BV, num_stages=STAGES):
        S = load_state(states + tile * (K * V), column, part * BK, V, K, BV, BK, DOT)
        dS = load_state(dstates + tile * (K * V), column, part * BK, V, K, BV, BK, DOT)
        dO = load_last(do + (m // E) * V, token, stop, values * V, column, V, BV, DOT, STEPS)
        dR = load_tokens(dr + m * V, token, stop, M * V, column, V, BV, DOT)
        U = load_tokens(u + m * V, token, stop, M * V, column, V, BV, DOT)
        from_q = tl.dot(dO, S, from_q, input_precision=PRECISION)
        from_a = tl.dot(dR, S, from_a, input_precision=PRECISION)
        kept = tl.dot(U, dS, kept, input_precision=PRECISION)
        through += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 0)

    g = decays_of(log_decay, token, r, valid, m, ck, M, K, STEPS)
    if WIDE:
        g = g.to(tl.float64)
    b, last = tl.cumsum(g, 0), tl.sum(g, 0)
    read = b - g if BEFORE else b
    share_sums(sums + own, b, M * K, ck, valid, K, BK)
    from_q *= exp2(b.to(tl.float32)) * scale
    from_a *= -exp2(read.to(tl.float32))
    kept *= exp2(tl.minimum((last[None, :] - b).to(tl.float32), 0.0))
    through *= exp2(last.to(tl.float32))

    Q = load_tile(q, q_rows, keys * K, ck, is_read, K, BK).to(tl.float32)
    Kk = load_tile(k, r, keys * K, ck, valid, K, BK).to(tl.float32)
    write = strength_of(beta, token, valid, m, M)
    if erase is None:
        erased_by = Kk
    else:
        erased_by = load_tile(erase + own, r, M * K, ck, valid, K, BK).to(tl.float32)
    A = erased_by
    if PRODUCT:
        A *= Kk
    if beta is not None:
        A *= write[:, None]
    P, L = load_symmetric(dP + tile * (CHUNK * CHUNK)), load_symmetric(dL + tile * (CHUNK * CHUNK))
    dQ, dA = tl.zeros([CHUNK, BK], tl.float32), tl.zeros([CHUNK, BK], tl.float32)
    dK = tl.zeros([CHUNK, BK], tl.float32)
    for level in tl.static_range(LEVELS):
        second, here = is_second(level)[:, None], separated(level)
        factor, at = factor_at(sums + own, b, M * K, ck, valid, level, K, BK)
        factor_a = factor
        if BEFORE:
            factor_a = tl.where(second, exp2(tl.minimum((read - at).to(tl.float32), 0.0)), factor)
        # one product for the queries of second halves and the keys of first halves
        other = (tl.where(second, Q, Kk) * factor).to(DOT)
        of_P = tl.dot(tl.where(here, P, 0.0).to(DOT), other, input_precision=PRECISION) * factor
        other = (tl.where(second, A, Kk) * factor_a).to(DOT)
        of_L = tl.dot(tl.where(here, L, 0.0).to(DOT), other, input_precision=PRECISION) * factor_a
        dQ += tl.where(second, of_P, 0.0)
        dA += tl.where(second, of_L, 0.0)
        dK += tl.where(second, 0.0, of_P + of_L)
    dQ += from_q
    dA += from_a
    if dg is not None:
        # later tokens reach back past this one, earlier ones forward: no sum of one sign is a difference of others
        erased = A * dA
        after = Q * dQ + erased - Kk * dK
        i, j = places()
        dG = tl.dot((j < i).to(DOT), (Kk * kept).to(DOT), input_precision=PRECISION)
        dG += tl.cumsum(after, 0, reverse=True) + through[None, :]
        if BEFORE:
            dG -= erased
        dG = tl.where(g <= LEAST, 0.0, dG)  # nothing passes a reset
        first, g_rows, is_first = of_step(token, r, valid, 0, STEPS)
        store_tile(dg + (first.to(tl.int64) * M + m) * K, g_rows, M * K, ck, is_first, dG, K, BK)
    itself = tl.load(diagonal + tile * CHUNK + r)[:, None]
    dQ += itself * Kk
    dK += kept + itself * Q
    if beta is not None:
        at = part.to(tl.int64) * rows * M + start * M + m + r * M
        tl.store(dbeta + at, tl.sum(erased_by * dA, 1), mask=valid)
        dA *= write[:, None]
    if PRODUCT:
        dK += dA * erased_by
        dA *= Kk
    if erase is None:
        dK += dA
    else:
        store_tile(derase + own, r, M * K, ck, valid, dA, K, BK)
    store_tile(dq + own_q, q_rows, M * K, ck, is_read, dQ, K, BK)
    store_tile(dk + own, r, M * K, ck, valid, dK, K, BK)
