"""The gradients of the selective scan in Triton, block by block, from the states before all chunks.

Running backward in time needs the states in reverse, and undoing a decay would amplify rounding errors. So a program,
chunk by chunk from the last, first runs forward and stores the state before every TOKENS tokens; then, from the last
of these, it runs forward again, with the states of these tokens in registers, and then backward:

    dh_t += c_t dy_t      dc_t = Σ_d dy_t h_t      dx_t = Σ_n dh_t b_t      db_t = Σ_d dh_t x_t
    s_t = dh_t ⊙ e^{log_decay_t rate} h_{t−1}      dlog_decay_t = Σ_n s_t rate      drate = Σ_t s_t log_decay_t
    dh_{t−1} = dh_t ⊙ e^{log_decay_t rate}

Sums over blocks of channels, or over blocks of tokens, are stored as partial sums, which are added in a fixed order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: SIM108

import triton
import triton.language as tl

from ...gpu.tiles import LOG2E, exp2
from .chunks import (
    block_at,
    input_of,
    load_states,
    load_token,
    load_tokens,
    over_channels,
    over_states,
    places,
    store_states,
    store_token,
    sum_states,
)


@triton.jit
def sum_channels(x):
    """The sums [NJ, LN] over all channels."""
    return tl.sum(tl.sum(x, 0), 2)


@triton.jit(do_not_specialize=["tokens"])
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
    blocks,
    tokens,
    D: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    DP: tl.constexpr,
    NJ: tl.constexpr,
    LN: tl.constexpr,
    LD: tl.constexpr,
    CHUNK: tl.constexpr,
    TOKENS: tl.constexpr,
    READ: tl.constexpr,
):
    block, column, d, n = places(tl.program_id(0), D, P, DP, NJ, LN, LD)
    start, size, chunk = block_at(blocks, block)
    rates = load_states(rate, block * 0, d, n, D, N)
    dh = load_states(after, block, d, n, D, N)
    zeros = load_states(None, block, d, n, D, N)
    rate_sum, dread = zeros, zeros
    if READ == "constant":
        read = load_states(c, block * 0, d, n, D, N)
    TILE: tl.constexpr = DP * NJ * LN * LD
    # numbers of one thread are contiguous: [LN, LD, DP, NJ]
    lane = tl.arange(0, LN)[:, None] * LD + tl.arange(0, LD)[None, :]
    own = tl.arange(0, DP)[:, None] * NJ + tl.arange(0, NJ)[None, :]
    scratch += tl.program_id(0).to(tl.int64) * (CHUNK // TOKENS * P * TILE)
    tile = scratch + lane[None, None, :, :] * (DP * NJ) + own[:, :, None, None]
    nothing: tl.constexpr = None
    if READ == "each":
        ask = c
    else:
        ask = nothing
    partial = column.to(tl.int64) * tokens
    chunks = tl.cdiv(size, CHUNK)
    for k in tl.range(0, chunks):
        first = (chunks - 1 - k) * CHUNK
        stop = tl.minimum(first + CHUNK, size)
        h = load_states(states, chunk + chunks - 1 - k, d, n, D, N)
        groups = tl.cdiv(stop - first, TOKENS)
        for i in tl.range(0, groups):
            for p in tl.static_range(P):
                tl.store(tile + (i * P + p) * TILE, h[p])
            if i + 1 < groups:
                xs, gs, bs, _ = load_tokens(x, log_decay, b, nothing, start, stop, first + i * TOKENS, d, n, D, N, False, TOKENS)
                for j in tl.static_range(TOKENS):
                    new = ()
                    for p in tl.static_range(P):
                        decay = exp2(over_channels(gs[j * P + p]) * (rates[p] * LOG2E))
                        new = new + (h[p] * decay + input_of(xs[j * P + p], bs[j] if b is not None else None, n, N),)
                    h = new
        for k2 in tl.range(0, groups):
            group = groups - 1 - k2
            at = first + group * TOKENS
            h = ()
            for p in tl.static_range(P):
                h = h + (tl.load(tile + (group * P + p) * TILE),)
            xs, gs, bs, cs = load_tokens(x, log_decay, b, ask, start, stop, at, d, n, D, N, False, TOKENS)
            dys, decays, decayed = (), (), ()
            for j in tl.static_range(TOKENS):
                new = ()
                for p in tl.static_range(P):
                    dys = dys + (load_token(dy, start + at + j, at + j < stop, d[p], D),)
                    decay = exp2(over_channels(gs[j * P + p]) * (rates[p] * LOG2E))
                    decays, decayed = decays + (decay,), decayed + (h[p] * decay,)
                    new = new + (decayed[j * P + p] + input_of(xs[j * P + p], bs[j] if b is not None else None, n, N),)
                h = new
            for j in tl.static_range(TOKENS - 1, -1, -1):
                token, inside = start + at + j, at + j < stop
                new, rate_new, read_new = (), (), ()
                b_sum, c_sum = tl.zeros([DP, NJ, LN, LD], tl.float32), tl.zeros([DP, NJ, LN, LD], tl.float32)
                for p in tl.static_range(P):
                    step, added, arriving = gs[j * P + p], xs[j * P + p], over_channels(dys[j * P + p])
                    before = decayed[j * P + p]
                    # the state of this token, and the gradient that arrives at it
                    weight = bs[j] if b is not None else None
                    if READ != "ones":
                        seen = (before + input_of(added, weight, n, N)) * arriving
                    if READ == "constant":
                        read_new = read_new + (dread[p] + seen,)
                        dstate = dh[p] + read[p] * arriving
                    elif READ == "each":
                        c_sum += seen
                        dstate = dh[p] + over_states(cs[j]) * arriving
                    else:
                        dstate = dh[p] + input_of(dys[j * P + p], None, n, N)
                    if b is not None:
                        store_token(dx, token, inside, d[p], D, sum_states(dstate * over_states(weight)))
                        b_sum += dstate * over_channels(added)
                    else:
                        store_token(dx, token, inside, d[p], D, sum_states(dstate))
                    product = dstate * before
                    store_token(dlog_decay, token, inside, d[p], D, sum_states(product * rates[p]))
                    rate_new = rate_new + (rate_sum[p] + product * over_channels(step),)
                    new = new + (dstate * decays[j * P + p],)
                if b is not None:
                    store_token(db, partial + token, inside, n, N, sum_channels(b_sum))
                if READ == "each":
                    store_token(dc, partial + token, inside, n, N, sum_channels(c_sum))
                if READ == "constant":
                    dread = read_new
                dh, rate_sum = new, rate_new
    if drate is not None:
        store_states(drate, block, d, n, D, N, rate_sum)
    if READ == "constant":
        store_states(dc, block, d, n, D, N, dread)
    if dinitial is not None:
        store_states(dinitial, block, d, n, D, N, dh)
