"""The passes that carry a state: one program per sequence, recurrence and block of values. Letters as in `prepare.py`.

Forward:   W = βV − Ã S      U = inverse W      O = Q̃ S + scores W      S ← e^{b_C} S + K̂ᵀ U
Backward:  dR = scoresᵀ dO + inverseᵀ (K̂ dS)      dS ← e^{b_C} dS + Q̃ᵀ dO − Ãᵀ dR

Everything is computed transposed: a product that is the left operand of the next product stays in registers on Hopper.
States before chunks, and their gradients, are stored as [V,K].
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from ....gpu.tiles import CHUNK, load_pairs, load_state, load_tokens, of_program, store_state, store_tokens
from ..steps import load_last, store_last
from .decays import strength_of


@triton.jit
def scan_forward(
    v,
    beta,
    inverse,
    scores,
    read_q,
    read_a,
    keep,
    total,
    initial,
    o,
    u,
    states,
    final,
    segments,
    M: tl.constexpr,
    E: tl.constexpr,
    STEPS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    STAGES: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    column, recurrence, m, start, stop, first = of_program(segments, M, V, BV)
    values: tl.constexpr = M // E  # heads of v
    state = recurrence.to(tl.int64) * (K * V)
    r, ck = tl.arange(0, CHUNK), tl.arange(0, BK)
    chunks = tl.cdiv(stop - start, CHUNK)
    if initial is not None:
        S = tl.trans(load_state(initial + state, 0, column, K, V, BK, BV, tl.float32))
    else:
        S = tl.zeros([BV, BK], tl.float32)
    for c in tl.range(0, chunks, num_stages=STAGES):
        token = start + c * CHUNK
        tile = (first + c).to(tl.int64) * M + m
        before = S.to(DTYPE)
        if states is not None:
            store_state(states + tile * (K * V), column, 0, V, K, BV, BK, before)
        A = load_tokens(read_a + m * K, token, stop, M * K, 0, K, BK, DTYPE)
        W = tl.trans(load_tokens(v + (m // E) * V, token, stop, values * V, column, V, BV, DTYPE)).to(tl.float32)
        W *= strength_of(beta, token, r < stop - token, m, M)[None, :]
        W = (W - tl.dot(before, tl.trans(A), input_precision=PRECISION)).to(DTYPE)
        solve = load_pairs(inverse + tile * (CHUNK * CHUNK), DTYPE)
        U = tl.dot(W, tl.trans(solve), input_precision=PRECISION)
        if o is not None:
            Q = load_last(read_q + m * K, token, stop, M * K, 0, K, BK, DTYPE, STEPS)
            weights = load_pairs(scores + tile * (CHUNK * CHUNK), DTYPE)
            O = tl.dot(before, tl.trans(Q), input_precision=PRECISION)
            O = tl.dot(W, tl.trans(weights), O, input_precision=PRECISION)
        Kk = load_tokens(keep + m * K, token, stop, M * K, 0, K, BK, DTYPE)
        over = tl.load(total + tile * K + ck, mask=ck < K, other=0.0)
        S = tl.dot(U.to(DTYPE), Kk, S * over[None, :], input_precision=PRECISION)
        if u is not None:
            store_tokens(u + m * V, token, stop, M * V, column, V, BV, tl.trans(U.to(DTYPE)))
        if o is not None:
            store_last(o + m * V, token, stop, M * V, column, V, BV, tl.trans(O.to(DTYPE)), STEPS)
    store_state(final + state, 0, column, K, V, BK, BV, tl.trans(S))


@triton.jit
def scan_backward(
    do,
    inverse,
    scores,
    read_q,
    read_a,
    keep,
    total,
    dfinal,
    dr,
    dstates,
    dinitial,
    segments,
    M: tl.constexpr,
    E: tl.constexpr,
    STEPS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    STAGES: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    column, recurrence, m, start, stop, first = of_program(segments, M, V, BV)
    values: tl.constexpr = M // E
    state = recurrence.to(tl.int64) * (K * V)
    ck = tl.arange(0, BK)
    chunks = tl.cdiv(stop - start, CHUNK)
    if dfinal is not None:
        dS = tl.trans(load_state(dfinal + state, 0, column, K, V, BK, BV, tl.float32))
    else:
        dS = tl.zeros([BV, BK], tl.float32)
    for i in tl.range(0, chunks, num_stages=STAGES):
        c = chunks - 1 - i
        token = start + c * CHUNK
        tile = (first + c).to(tl.int64) * M + m
        after = dS.to(DTYPE)
        store_state(dstates + tile * (K * V), column, 0, V, K, BV, BK, after)
        Kk = load_tokens(keep + m * K, token, stop, M * K, 0, K, BK, DTYPE)
        dO = tl.trans(load_last(do + (m // E) * V, token, stop, values * V, column, V, BV, DTYPE, STEPS))
        dU = tl.dot(after, tl.trans(Kk), input_precision=PRECISION).to(DTYPE)
        dR = tl.dot(dO, load_pairs(scores + tile * (CHUNK * CHUNK), DTYPE), input_precision=PRECISION)
        dR = tl.dot(dU, load_pairs(inverse + tile * (CHUNK * CHUNK), DTYPE), dR, input_precision=PRECISION)
        Q = load_last(read_q + m * K, token, stop, M * K, 0, K, BK, DTYPE, STEPS)
        A = load_tokens(read_a + m * K, token, stop, M * K, 0, K, BK, DTYPE)
        over = tl.load(total + tile * K + ck, mask=ck < K, other=0.0)
        dS = tl.dot(dO, Q, dS * over[None, :], input_precision=PRECISION)
        dS = tl.dot((-dR).to(DTYPE), A, dS, input_precision=PRECISION)
        store_tokens(dr + m * V, token, stop, M * V, column, V, BV, tl.trans(dR.to(DTYPE)))
    store_state(dinitial + state, 0, column, K, V, BK, BV, tl.trans(dS))
