"""The passes of the (gated) delta rule for keys whose state does not fit into registers: it stays in memory.

The equations are those of `sequential_pass.py`. A program reads the state, a block of keys at a time, for what a chunk
takes from it, and reads and writes it again for what the chunk leaves. What all programs hold fits into the L2 cache of
a large device. The state lies where the final one is returned, so that it takes no other memory.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from ...gpu.tiles import CHUNK, load_pairs, load_state, load_tokens, of_program, store_state, store_tokens
from .steps import load_last, store_last


@triton.jit
def start_state(x, initial, column, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Write the initial state, or zeros."""
    for row in tl.range(0, K, BK):
        block = tl.zeros([BK, BV], tl.float32)
        if initial is not None:
            block = load_state(initial, row, column, K, V, BK, BV, tl.float32)
        store_state(x, row, column, K, V, BK, BV, block)


@triton.jit
def long_forward(
    q,
    k,
    v,
    inverse,
    scores,
    gates,
    bounds,  # None: with keys this long, sequences are not cut
    initial,
    o,
    u,
    states,
    final,
    has_transition,  # None, like bounds
    segments,
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
    column, recurrence, m, start, stop, first = of_program(segments, M, V, BV)
    keys: tl.constexpr = M // R  # heads of q and k
    values: tl.constexpr = M // E  # and of v
    head = (m // (E * R)) * E + m % E
    q += head * K
    k += head * K
    v += (m // E) * V
    if o is not None:
        o += m * V
    if u is not None:
        u += m * V
    r = tl.arange(0, CHUNK)

    state = recurrence.to(tl.int64) * (K * V)
    S = final + state
    start_state(S, None if initial is None else initial + state, column, K, V, BK, BV)
    for c in tl.range(0, tl.cdiv(stop - start, CHUNK)):
        tl.debug_barrier()  # other threads wrote what is read next
        token = start + c * CHUNK
        tile = (first + c).to(tl.int64) * M + m
        at = gates + tile * (4 * CHUNK)
        shrink, keep, total = tl.load(at + r), tl.load(at + CHUNK + r), tl.load(at + (CHUNK - 1))
        update, O = tl.zeros([CHUNK, BV], tl.float32), tl.zeros([CHUNK, BV], tl.float32)
        for row in tl.range(0, K, BK, num_stages=STAGES):
            before = load_state(S, row, column, K, V, BK, BV, tl.float32).to(DTYPE)
            keys_here = load_tokens(k, token, stop, keys * K, row, K, BK, DTYPE)
            update = tl.dot(keys_here, before, update, input_precision=PRECISION)
            if o is not None:
                queries = load_last(q, token, stop, keys * K, row, K, BK, DTYPE, STEPS)
                O = tl.dot(queries, before, O, input_precision=PRECISION)
            if states is not None:
                store_state(states + tile * (K * V), row, column, K, V, BK, BV, before)
        update *= -shrink[:, None]
        update += load_tokens(v, token, stop, values * V, column, V, BV, DTYPE).to(tl.float32)
        W = update.to(DTYPE)
        U = tl.dot(load_pairs(inverse + tile * (CHUNK * CHUNK), DTYPE), W, input_precision=PRECISION)
        if o is not None:
            weights = load_pairs(scores + tile * (CHUNK * CHUNK), DTYPE)
            O = tl.dot(weights, W, O * (shrink * scale)[:, None], input_precision=PRECISION)
            store_last(o, token, stop, M * V, column, V, BV, O, STEPS)
        if u is not None:
            store_tokens(u, token, stop, M * V, column, V, BV, U)
        decayed_U = (U * keep[:, None]).to(DTYPE)
        tl.debug_barrier()  # other threads have read what is written next
        for row in tl.range(0, K, BK, num_stages=STAGES):
            block = load_state(S, row, column, K, V, BK, BV, tl.float32) * total
            keys_here = load_tokens(k, token, stop, keys * K, row, K, BK, DTYPE)
            block = tl.dot(tl.trans(keys_here), decayed_U, block, input_precision=PRECISION)
            store_state(S, row, column, K, V, BK, BV, block)


@triton.jit
def long_backward(
    q,
    k,
    do,
    inverse,
    scores,
    gates,
    bounds,  # None: with keys this long, sequences are not cut
    dfinal,
    dv,
    dstates,
    dinitial,
    segments,
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
    column, recurrence, m, start, stop, first = of_program(segments, M, V, BV)
    keys: tl.constexpr = M // R  # heads of q and k
    values: tl.constexpr = M // E  # and of v
    head = (m // (E * R)) * E + m % E
    q += head * K
    k += head * K
    do += (m // E) * V
    dv += m * V
    r = tl.arange(0, CHUNK)

    state = recurrence.to(tl.int64) * (K * V)
    dS = dinitial + state
    start_state(dS, None if dfinal is None else dfinal + state, column, K, V, BK, BV)
    chunks = tl.cdiv(stop - start, CHUNK)
    for i in tl.range(0, chunks):
        tl.debug_barrier()  # other threads wrote what is read next
        c = chunks - 1 - i
        token = start + c * CHUNK
        tile = (first + c).to(tl.int64) * M + m
        at = gates + tile * (4 * CHUNK)
        shrink, keep, total = tl.load(at + r), tl.load(at + CHUNK + r), tl.load(at + (CHUNK - 1))
        dU = tl.zeros([CHUNK, BV], tl.float32)
        for row in tl.range(0, K, BK, num_stages=STAGES):
            after = load_state(dS, row, column, K, V, BK, BV, tl.float32).to(DTYPE)
            keys_here = load_tokens(k, token, stop, keys * K, row, K, BK, DTYPE)
            dU = tl.dot(keys_here, after, dU, input_precision=PRECISION)
            store_state(dstates + tile * (K * V), row, column, K, V, BK, BV, after)
        weights = load_pairs(scores + tile * (CHUNK * CHUNK), DTYPE)
        solve = load_pairs(inverse + tile * (CHUNK * CHUNK), DTYPE)
        dO = load_last(do, token, stop, values * V, column, V, BV, DTYPE, STEPS)
        dV = tl.dot(tl.trans(weights), dO, input_precision=PRECISION)
        dV = tl.dot(tl.trans(solve), (dU * keep[:, None]).to(DTYPE), dV, input_precision=PRECISION)
        store_tokens(dv, token, stop, M * V, column, V, BV, dV)
        read = (dO.to(tl.float32) * (shrink * scale)[:, None]).to(DTYPE)
        seen = (dV * -shrink[:, None]).to(DTYPE)
        tl.debug_barrier()  # other threads have read what is written next
        for row in tl.range(0, K, BK, num_stages=STAGES):
            block = load_state(dS, row, column, K, V, BK, BV, tl.float32) * total
            queries = load_last(q, token, stop, keys * K, row, K, BK, DTYPE, STEPS)
            keys_here = load_tokens(k, token, stop, keys * K, row, K, BK, DTYPE)
            block = tl.dot(tl.trans(queries), read, block, input_precision=PRECISION)
            block = tl.dot(tl.trans(keys_here), seen, block, input_precision=PRECISION)
            store_state(dS, row, column, K, V, BK, BV, block)
