"""The gradients of the selective scan in Triton, chunk by chunk, from the states and their gradients at the cuts.

Running backward in time needs the states of a chunk in reverse, and undoing a decay would amplify rounding errors. So a
program first runs forward through its chunk and stores the state before every `PART` tokens; then, part by part from
the last, it runs forward again, storing all states of the part, and then backward:

    dh_t += c_t dy_t      dc_t = Σ_d dy_t h_t      dx_t = Σ_n dh_t b_t      db_t = Σ_d dh_t x_t
    s_t = dh_t ⊙ e^{log_decay_t rate} h_{t−1}      dlog_decay_t = Σ_n s_t rate      drate = Σ_t s_t log_decay_t
    dh_{t−1} = dh_t ⊙ e^{log_decay_t rate}

Sums over blocks of channels, or over chunks, are stored as partial sums, which are added in a fixed order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: SIM108

import triton
import triton.language as tl

from ...gpu.tiles import chunk_at
from .chunks import advance, load_decay, load_states, load_token, store_states, store_token


@triton.jit(do_not_specialize=["tokens", "marks"])
def gradients(
    x,
    log_decay,
    rate,
    b,
    c,
    states,
    after,
    dy,
    scratch,
    dx,
    dlog_decay,
    drate,
    db,
    dc,
    dinitial,
    chunks,
    tokens,
    marks,
    D: tl.constexpr,
    N: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
    PART: tl.constexpr,
    READ: tl.constexpr,
):
    BLOCKS: tl.constexpr = (D + BD - 1) // BD
    chunk, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    d, n = block * BD + tl.arange(0, BD), tl.arange(0, BN)
    start, stop = chunk_at(chunks, chunk)
    rates = load_states(rate, chunk * 0, d, n, D, N)
    if READ == "constant":
        read = load_states(c, chunk * 0, d, n, D, N)
        dread = tl.zeros([BN, BD], tl.float32)
    if states is not None:
        h = load_states(states, chunk, d, n, D, N)
    else:
        h = tl.zeros([BN, BD], tl.float32)
    # the states of one part, then the first state of every part
    tile = n[:, None] * BD + tl.arange(0, BD)[None, :]
    scratch += tl.program_id(0).to(tl.int64) * ((PART + marks) * (BN * BD))
    parts = tl.cdiv(stop - start, PART)
    for i in tl.range(0, stop - start):
        if i % PART == 0:
            tl.store(scratch + (PART + i // PART) * (BN * BD) + tile, h)
        token = start + i
        decay = tl.exp(load_decay(log_decay, token, d, D)[None, :] * rates)
        h = advance(h, load_token(x, token, d, D), decay, b, token, n, N)

    if after is not None:
        dh = load_states(after, chunk, d, n, D, N)
    else:
        dh = tl.zeros([BN, BD], tl.float32)
    if drate is not None:
        rate_sum = tl.zeros([BN, BD], tl.float32)
    partial = block.to(tl.int64) * tokens
    for i in tl.range(0, parts):
        part = parts - 1 - i
        first = start + part * PART
        size = tl.minimum(PART, stop - first)
        tl.debug_barrier()
        h = tl.load(scratch + (PART + part) * (BN * BD) + tile)
        for j in tl.range(0, size):
            tl.store(scratch + j * (BN * BD) + tile, h)
            decay = tl.exp(load_decay(log_decay, first + j, d, D)[None, :] * rates)
            h = advance(h, load_token(x, first + j, d, D), decay, b, first + j, n, N)
        tl.debug_barrier()
        for j in tl.range(0, size):
            token = first + size - 1 - j
            step = load_decay(log_decay, token, d, D)
            added = load_token(x, token, d, D)
            arriving = load_token(dy, token, d, D)
            decayed = tl.load(scratch + (size - 1 - j) * (BN * BD) + tile)
            decay = tl.exp(step[None, :] * rates)
            decayed *= decay
            # the state of this token, and the gradient that arrives at it
            if READ == "constant":
                dread += advance(decayed, added, 1.0, b, token, n, N) * arriving[None, :]
                dh += read * arriving[None, :]
            elif READ == "each":
                seen = advance(decayed, added, 1.0, b, token, n, N) * arriving[None, :]
                store_token(dc, partial + token, n, N, tl.sum(seen, 1))
                dh += load_token(c, token, n, N)[:, None] * arriving[None, :]
            else:
                dh += tl.where((n < N)[:, None], arriving[None, :], 0.0)
            if b is not None:
                store_token(dx, token, d, D, tl.sum(dh * load_token(b, token, n, N)[:, None], 0))
                store_token(db, partial + token, n, N, tl.sum(dh * added[None, :], 1))
            else:
                store_token(dx, token, d, D, tl.sum(dh, 0))
            product = dh * decayed
            store_token(dlog_decay, token, d, D, tl.sum(product * rates, 0))
            if drate is not None:
                rate_sum += product * step[None, :]
            dh *= decay
    if drate is not None:
        store_states(drate, chunk, d, n, D, N, rate_sum)
    if READ == "constant":
        store_states(dc, chunk, d, n, D, N, dread)
    if dinitial is not None:
        store_states(dinitial, chunk, d, n, D, N, dh)
