"""The passes of the (gated) delta rule that carry a state: one program per segment, recurrence and block of values.

Letters as in `chunk.py` and `prepare.py`. From chunk to chunk, forward and then backward in time:

    W = V − e^b ⊙ K S      U = inverse W      O = scale · e^b ⊙ Q S + scores W      S ← e^{b_C} S + (e^{b_C − b} K)ᵀ U
    dV = scoresᵀ dO + inverseᵀ (e^{b_C − b} ⊙ K dS)      dS ← e^{b_C} dS + (e^b Q)ᵀ dO · scale − (e^b K)ᵀ dV

Where there are too few recurrences to fill the device, a sequence is cut into segments that run in parallel. A segment
maps the state before it to transition · S + local. Both come from the same pass without outputs: the local part from
S = 0, the transition from S = I and no values; `combine` then computes the states at the cuts. Backward in time it is
the same with the transition transposed. Where decays erase what a segment knew, its local part is that of its last
chunks alone (backward in time, of its first), and the transition is zero: neither pass visits the other chunks.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment"
# ruff: noqa: RUF005
# ruff: noqa: SIM102

import triton
import triton.language as tl

from ...gpu.tiles import CHUNK, load_pairs, load_state, load_tokens, of_program, store_state, store_tokens
from .steps import load_last, store_last

# A transition of norm 2^−60 leaves nothing of a state in fp32, unless that state is 2^36 times as large as the next.
ERASED = tl.constexpr(-60.0)  # log2
FARTHEST = tl.constexpr(256)  # chunks


@triton.jit
def remembered(bounds, first, chunks, m, M: tl.constexpr, REVERSE: tl.constexpr):
    """On how many chunks of a segment the state at its end (in reverse, at its start) depends, and on no state before.

    At most `FARTHEST` chunks are looked at; beyond them, nothing counts as erased.
    """
    i = tl.arange(0, FARTHEST)
    c = i if REVERSE else chunks - 1 - i
    bound = tl.load(bounds + (first + c).to(tl.int64) * M + m, mask=i < chunks, other=0.0)
    nearest = tl.min(tl.where(tl.cumsum(bound, 0) <= ERASED, i, FARTHEST), 0)
    erased = nearest < FARTHEST
    return tl.where(erased, nearest + 1, chunks), erased


@triton.jit
def scan_forward(
    q,
    k,
    v,
    inverse,
    scores,  # None: W is β ⊙ W, U = β H W, `inverse` has β H; `gates` are those of `hopper_prepare.py` for that
    gates,
    bounds,  # of chunks, for what a segment does to the state; None for whole passes
    initial,
    o,
    u,
    states,
    final,
    has_transition,  # of segments and recurrences, for transitions: 1, or 0 if the transition is zero
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
    if v is not None:
        v += (m // E) * V
    if o is not None:
        o += m * V
    if u is not None:
        u += m * V
    r = tl.arange(0, CHUNK)

    state = recurrence.to(tl.int64) * (K * V)
    chunks = tl.cdiv(stop - start, CHUNK)
    begin = 0
    if initial is not None:
        S = load_state(initial + state, 0, column, K, V, BK, BV, tl.float32)
    else:
        S = tl.zeros([BK, BV], tl.float32)
    if bounds is not None:
        count, erased = remembered(bounds, first, chunks, m, M, False)
        if v is None:
            one = tl.where(erased, 0.0, 1.0)
            S = tl.where(tl.arange(0, BK)[:, None] == (column + tl.arange(0, BV))[None, :], one, 0.0)
            begin = tl.where(erased, chunks, 0)
            tl.store(has_transition + recurrence, one, mask=column == 0)
        else:
            begin = chunks - count
    before = S.to(DTYPE)
    if states is not None:
        if chunks > 0:
            store_state(states + (first.to(tl.int64) * M + m) * (K * V), 0, column, K, V, BK, BV, before)
    # Three stages are short of registers, and spills would make them slower than two. So what a chunk leaves in memory
    # is stored at its end, when few values are live, and head counts are constants, so that addresses take few.
    for c in tl.range(begin, chunks, num_stages=STAGES):
        token = start + c * CHUNK
        tile = (first + c).to(tl.int64) * M + m
        at = gates + tile * (4 * CHUNK)
        shrink, keep, total = tl.load(at + r), tl.load(at + CHUNK + r), tl.load(at + (CHUNK - 1))
        keys_here = load_tokens(k, token, stop, keys * K, 0, K, BK, DTYPE)
        solve = load_pairs(inverse + tile * (CHUNK * CHUNK), DTYPE)
        update = tl.dot(keys_here, before, input_precision=PRECISION) * -shrink[:, None]
        if v is not None:
            update += load_tokens(v, token, stop, values * V, column, V, BV, DTYPE).to(tl.float32)
        if scores is None:
            update *= keep[:, None]  # without scores, the second row of `gates` has β
            high, low = at + 2 * CHUNK, at + 3 * CHUNK
            until = tl.load(high + (CHUNK - 1)) - tl.load(high + r)
            until += tl.load(low + (CHUNK - 1)) - tl.load(low + r)
            keep = tl.exp2(until)
        W = update.to(DTYPE)
        U = tl.dot(solve, W, input_precision=PRECISION)
        if o is not None:
            queries = load_last(q, token, stop, keys * K, 0, K, BK, DTYPE, STEPS)
            weights = load_pairs(scores + tile * (CHUNK * CHUNK), DTYPE)
            O = tl.dot(queries, before, input_precision=PRECISION) * (shrink * scale)[:, None]
            O = tl.dot(weights, W, O, input_precision=PRECISION)
        S = tl.dot(tl.trans(keys_here), (U * keep[:, None]).to(DTYPE), S * total, input_precision=PRECISION)
        before = S.to(DTYPE)
        if u is not None:
            store_tokens(u, token, stop, M * V, column, V, BV, U)
        if o is not None:
            store_last(o, token, stop, M * V, column, V, BV, O, STEPS)
        if states is not None:
            if c + 1 < chunks:
                store_state(states + (tile + M) * (K * V), 0, column, K, V, BK, BV, before)
    if final is not None:
        store_state(final + state, 0, column, K, V, BK, BV, S)


@triton.jit
def scan_backward(
    q,
    k,
    do,
    inverse,
    scores,
    gates,
    bounds,
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
    if dv is not None:
        dv += m * V
    r = tl.arange(0, CHUNK)

    state = recurrence.to(tl.int64) * (K * V)
    if dfinal is not None:
        dS = load_state(dfinal + state, 0, column, K, V, BK, BV, tl.float32)
    else:
        dS = tl.zeros([BK, BV], tl.float32)
    chunks = tl.cdiv(stop - start, CHUNK)
    begin = 0
    if bounds is not None:
        count, _ = remembered(bounds, first, chunks, m, M, True)
        begin = chunks - count
    for i in tl.range(begin, chunks, num_stages=STAGES):
        c = chunks - 1 - i
        token = start + c * CHUNK
        tile = (first + c).to(tl.int64) * M + m
        at = gates + tile * (4 * CHUNK)
        shrink, keep, total = tl.load(at + r), tl.load(at + CHUNK + r), tl.load(at + (CHUNK - 1))
        keys_here = load_tokens(k, token, stop, keys * K, 0, K, BK, DTYPE)
        weights = load_pairs(scores + tile * (CHUNK * CHUNK), DTYPE)
        dO = load_last(do, token, stop, values * V, column, V, BV, DTYPE, STEPS)
        solve = load_pairs(inverse + tile * (CHUNK * CHUNK), DTYPE)
        queries = load_last(q, token, stop, keys * K, 0, K, BK, DTYPE, STEPS)
        after = dS.to(DTYPE)
        if dstates is not None:
            store_state(dstates + tile * (K * V), 0, column, K, V, BK, BV, after)
        dU = tl.dot(keys_here, after, input_precision=PRECISION) * keep[:, None]
        dV = tl.dot(tl.trans(weights), dO, input_precision=PRECISION)
        dV = tl.dot(tl.trans(solve), dU.to(DTYPE), dV, input_precision=PRECISION)
        if dv is not None:
            store_tokens(dv, token, stop, M * V, column, V, BV, dV)
        read = (dO.to(tl.float32) * (shrink * scale)[:, None]).to(DTYPE)
        dS = tl.dot(tl.trans(queries), read, dS * total, input_precision=PRECISION)
        seen = (dV * -shrink[:, None]).to(DTYPE)
        dS = tl.dot(tl.trans(keys_here), seen, dS, input_precision=PRECISION)
    store_state(dinitial + state, 0, column, K, V, BK, BV, dS)


@triton.jit
def neighbours(first, count, i, m, M, REVERSE: tl.constexpr):
    """Return the state indices of the i-th segment, in the order of the pass, and of the segment after it."""
    here = (first + (count - 1 - i if REVERSE else i)).to(tl.int64) * M + m
    return here, here - M if REVERSE else here + M


@triton.jit(do_not_specialize=["M"])
def combine(
    transition,
    has_transition,
    local,
    end,
    states,
    sequences,  # [sequences,2]: first segment, segments
    M,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    REVERSE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The states before all segments, or in reverse the gradients after them, from the one at that end."""
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    column = (tl.program_id(0) % BLOCKS) * BV
    recurrence = tl.program_id(0) // BLOCKS
    n, m = recurrence // M, recurrence % M
    first = tl.load(sequences + n * 2)
    count = tl.load(sequences + n * 2 + 1)
    known_at = (first + (count - 1 if REVERSE else 0)).to(tl.int64) * M + m
    S = ()  # in blocks of rows
    for row in tl.static_range(0, K, BK):
        if end is not None:
            block = load_state(end + recurrence.to(tl.int64) * (K * V), row, column, K, V, BK, BV, tl.float32)
        else:
            block = tl.zeros([BK, BV], tl.float32)
        store_state(states + known_at * (K * V), row, column, K, V, BK, BV, block)
        S = S + (block,)
    r, c = tl.arange(0, BK)[:, None], tl.arange(0, BK)[None, :]
    bit = tl.arange(0, 32)
    for begin in range(0, count - 1, 32):
        group = first + (count - 1 - begin - bit if REVERSE else begin + bit)
        flags = tl.load(has_transition + group.to(tl.int64) * M + m, mask=begin + bit < count - 1, other=0.0) != 0
        exist = tl.sum(flags.to(tl.int32) << bit, 0)  # bit i: whether segment i of the group has a transition
        end_of_group = tl.minimum(begin + 32, count - 1)
        begin_of_products = end_of_group if exist == 0 else begin
        # without transitions, no segment depends on another, so several loads overlap
        for i in tl.range(begin, begin_of_products, num_stages=4):
            here, there = neighbours(first, count, i, m, M, REVERSE)
            following = ()
            for row in tl.static_range(0, K, BK):
                block = load_state(local + here * (K * V), row, column, K, V, BK, BV, tl.float32)
                store_state(states + there * (K * V), row, column, K, V, BK, BV, block)
                following = following + (block,)
            S = following
        for i in tl.range(begin_of_products, end_of_group, num_stages=STAGES):
            here, there = neighbours(first, count, i, m, M, REVERSE)
            exists = (exist >> (i - begin)) & 1 != 0
            following = ()
            for row in tl.static_range(0, K, BK):
                block = load_state(local + here * (K * V), row, column, K, V, BK, BV, tl.float32)
                for inner in tl.static_range(0, K, BK):
                    i_r, i_c = (inner + r, row + c) if REVERSE else (row + r, inner + c)
                    at = transition + here * (K * K) + i_r * K + i_c
                    A = tl.load(at, mask=exists & (i_r < K) & (i_c < K), other=0.0)
                    if REVERSE:
                        A = tl.trans(A)
                    if exists:  # around the products alone, so that loads are ahead of them
                        block = tl.dot(A, S[inner // BK], block, input_precision=PRECISION)
                store_state(states + there * (K * V), row, column, K, V, BK, BV, block)
                following = following + (block,)
            S = following
