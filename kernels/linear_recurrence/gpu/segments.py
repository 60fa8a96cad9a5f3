"""Sequences that are cut into segments: what each segment adds to the state, and the states that segments start from.

Both directions in time: the state S [K,V] from keys and values, or its gradient from queries and gradients of outputs.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: SIM108

import triton
import triton.language as tl

from ...gpu.tiles import CHUNK, exp2, load_tile, pair_of
from .sequential_pass import TOTAL, constant_decay, factors, key_head_of, part_at, segment_of, state_at


@triton.jit(do_not_specialize=["chunks", "groups"])
def segment_states(
    y,  # [tokens,·,K]
    z,  # [tokens,·,V]
    beta,  # [tokens,heads], if CONSTANT and there is one
    gates,  # as in `output_pass`
    last,  # [segments,heads,K,V]: what each segment adds to the state
    survives,  # [segments,heads]: how much of a state survives the segment; per channel [segments,heads,K]
    segments,
    y_head,
    z_head,
    scale,
    chunks,
    groups,
    y_token: tl.constexpr,
    z_token: tl.constexpr,
    heads: tl.constexpr,
    SUBHEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PARTS: tl.constexpr,
    REVERSE: tl.constexpr,
    CHANNEL: tl.constexpr,
    DECAY: tl.constexpr,
    CONSTANT: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    slice_, segment, n, start, length, first_chunk, _, state = segment_of(segments, heads, V, BV)
    count = tl.cdiv(length, CHUNK)
    key_head = n if CHANNEL else key_head_of(n, groups, SUBHEADS)
    y += start * y_token + key_head.to(tl.int64) * y_head
    z += start * z_token + (n // SUBHEADS).to(tl.int64) * z_head
    place = n.to(tl.int64) * chunks + first_chunk
    if beta is not None:
        beta += start * heads + n
    r, ck, cv = tl.arange(0, CHUNK), tl.arange(0, BK), slice_ * BV + tl.arange(0, BV)
    S = tl.zeros([BK, BV], tl.float32)
    g = 0.0
    if CHANNEL:
        gates += place * K
        left = tl.full([BK], 1.0, tl.float32)
    else:
        left = 1.0
        if not CONSTANT:
            gates += place * (PARTS * CHUNK)
        elif not REVERSE:
            g = constant_decay(gates, n, DECAY)
    for i in tl.range(0, count, num_stages=STAGES):
        c = count - 1 - i if REVERSE else i
        t = c * CHUNK + r
        valid = t < length
        Y = load_tile(y, t, y_token, ck, valid, K, BK)
        Z = load_tile(z, t, z_token, cv, valid, V, BV)
        if CONSTANT and REVERSE:
            g = constant_decay(gates, n, DECAY)
        if not CHANNEL:
            rest = factors(gates, g, c, length, scale, beta, t * heads, valid, REVERSE, CONSTANT, PARTS)[1]
            Z = (Z.to(tl.float32) * rest[:, None]).to(Y.dtype)
        if DECAY:
            if CONSTANT:
                keep = exp2(tl.minimum(length - c * CHUNK, CHUNK).to(tl.float32) * g)
            elif CHANNEL:
                keep = tl.load(gates + c * K + ck, mask=ck < K, other=0.0)
            else:
                keep = tl.load(part_at(gates, c, TOTAL, PARTS))
            S = S * (keep[:, None] if CHANNEL else keep)
            left = left * keep
        S = tl.dot(tl.trans(Y), Z, S, input_precision=PRECISION)
    in_state = (ck < K)[:, None] & (cv < V)[None, :]
    tl.store(state_at(last, state, n, heads, K * V) + ck[:, None] * V + cv[None, :], S, mask=in_state)
    if DECAY:
        at = segment.to(tl.int64) * heads + n
        if CHANNEL:
            tl.store(survives + at * K + ck, left, mask=ck < K)
        else:
            tl.store(survives + at, left)


@triton.jit(do_not_specialize=["heads"])
def scan(
    local,  # [segments,heads,K,V]: what each segment adds to the state; becomes the state before it (in scan order)
    survives,  # as in `segment_states`
    first,  # [sequences,heads,K,V], or None for zeros; like last, if needed
    last,
    sequences,  # [sequences,2]: first segment, segments
    heads,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    CHANNEL: tl.constexpr,
    DECAY: tl.constexpr,
    REVERSE: tl.constexpr,
):
    block, recurrence = pair_of((K * V + BLOCK - 1) // BLOCK)
    at = block * BLOCK + tl.arange(0, BLOCK)
    n, sequence = recurrence % heads, recurrence // heads
    inside = at < K * V
    begin = tl.load(sequences + sequence * 2)
    count = tl.load(sequences + sequence * 2 + 1)
    offsets = (sequence.to(tl.int64) * heads + n) * (K * V) + at
    if first is not None:
        S = tl.load(first + offsets, mask=inside, other=0.0)
    else:
        S = tl.zeros([BLOCK], tl.float32)
    for i in tl.range(0, count, num_stages=4):  # reads ahead
        segment = begin + (count - 1 - i if REVERSE else i)
        row = segment.to(tl.int64) * heads + n
        added = tl.load(local + row * (K * V) + at, mask=inside, other=0.0)
        tl.store(local + row * (K * V) + at, S, mask=inside)
        if DECAY:
            if CHANNEL:
                S = S * tl.load(survives + row * K + at // V, mask=inside, other=0.0)
            else:
                S = S * tl.load(survives + row)
        S += added
    if last is not None:
        tl.store(last + offsets, S, mask=inside)
