"""The gradients of the selective scan in Triton, block by block, from the states before all chunks.

Running backward in time needs the states in reverse, and undoing a decay would amplify rounding errors. So a program,
chunk by chunk from the last, first runs forward and stores the state before every TOKENS tokens; then, from the last
of these, it runs forward again, with the states of these tokens in registers, and then backward:

    dh_t += c_t dy_t      dc_t = Σ_d dy_t h_t      dx_t = Σ_n dh_t b_t      db_t = Σ_d dh_t x_t
    s_t = dh_t ⊙ e^{log_decay_t rate} h_{t−1}      dlog_decay_t = Σ_n s_t rate      drate = Σ_t s_t log_decay_t
    dh_{t−1} = dh_t ⊙ e^{log_decay_t rate}

Sums over blocks of channels, or over blocks of tokens, are stored as partial sums, which are added in a fixed order.
"""

# tuples grow in loops that the compiler unrolls
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, var-annotated"
# ruff: noqa: RUF005

import triton
import triton.language as tl

from .chunks import (
    block_at,
    bounded,
    decay_of,
    input_of,
    load_states,
    load_tokens,
    over_channels,
    over_states,
    places,
    row_of,
    store_row,
    store_states,
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
    AHEAD: tl.constexpr,
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
    partial = column.to(tl.int64) * tokens
    chunks = tl.cdiv(size, CHUNK)
    for k in tl.range(0, chunks):
        first = (chunks - 1 - k) * CHUNK
        stop = tl.minimum(first + CHUNK, size)
        groups = tl.cdiv(stop - first, TOKENS)
        h = load_states(states, chunk + chunks - 1 - k, d, n, D, N)
        if AHEAD:
            last = first + (groups - 1) * TOKENS
            next_dy, next_c = load_tokens(dy, start, stop, last, d, D, TOKENS, False), ()
            if READ == "each":
                next_c = load_tokens(c, start, stop, last, (n,), N, TOKENS, False)
            next_x = load_tokens(x, start, stop, first, d, D, TOKENS, False)
            next_g = load_tokens(log_decay, start, stop, first, d, D, TOKENS, False)
            next_b = load_tokens(b, start, stop, first, (n,), N, TOKENS, False)
        for i in tl.range(0, groups):
            for p in tl.static_range(P):
                tl.store(tile + (i * P + p) * TILE, h[p])
            if i + 1 < groups:
                if AHEAD:
                    xs, gs, bs = next_x, next_g, next_b
                    next_x = load_tokens(x, start, stop, first + (i + 1) * TOKENS, d, D, TOKENS, False)
                    next_g = load_tokens(log_decay, start, stop, first + (i + 1) * TOKENS, d, D, TOKENS, False)
                    next_b = load_tokens(b, start, stop, first + (i + 1) * TOKENS, (n,), N, TOKENS, False)
                else:
                    xs = load_tokens(x, start, stop, first + i * TOKENS, d, D, TOKENS, False)
                    gs = load_tokens(log_decay, start, stop, first + i * TOKENS, d, D, TOKENS, False)
                    bs = load_tokens(b, start, stop, first + i * TOKENS, (n,), N, TOKENS, False)
                for j in tl.static_range(TOKENS):
                    new = ()
                    for p in tl.static_range(P):
                        decay = decay_of(bounded(gs[j * P + p]), rates[p])
                        new = new + (h[p] * decay + input_of(xs[j * P + p], bs, j, n, N),)
                    h = new
        tl.debug_barrier()
        for i in tl.range(0, groups):
            group = groups - 1 - i
            at = first + group * TOKENS
            h = ()
            for p in tl.static_range(P):
                h = h + (tl.load(tile + (group * P + p) * TILE),)
            xs = load_tokens(x, start, stop, at, d, D, TOKENS, False)
            gs = load_tokens(log_decay, start, stop, at, d, D, TOKENS, False)
            bs = load_tokens(b, start, stop, at, (n,), N, TOKENS, False)
            if AHEAD:
                dys, cs = next_dy, next_c
                before_at = tl.maximum(at - TOKENS, 0)
                next_dy = load_tokens(dy, start, stop, before_at, d, D, TOKENS, False)
                if READ == "each":
                    next_c = load_tokens(c, start, stop, before_at, (n,), N, TOKENS, False)
            else:
                dys, cs = load_tokens(dy, start, stop, at, d, D, TOKENS, False), ()
                if READ == "each":
                    cs = load_tokens(c, start, stop, at, (n,), N, TOKENS, False)
            decays, decayed = (), ()
            for j in tl.static_range(TOKENS):
                new = ()
                for p in tl.static_range(P):
                    decay = decay_of(bounded(gs[j * P + p]), rates[p])
                    decays, decayed = decays + (decay,), decayed + (h[p] * decay,)
                    new = new + (decayed[j * P + p] + input_of(xs[j * P + p], bs, j, n, N),)
                h = new
            row = start + at
            x_row, g_row = row_of(dx, row, D), row_of(dlog_decay, row, D)
            if b is not None:
                b_row = row_of(db, partial + row, N)
            if READ == "each":
                c_row = row_of(dc, partial + row, N)
            for j in tl.static_range(TOKENS - 1, -1, -1):
                inside = at + j < stop
                new, rate_new, read_new = (), (), ()
                b_sum, c_sum = tl.zeros([DP, NJ, LN, LD], tl.float32), tl.zeros([DP, NJ, LN, LD], tl.float32)
                for p in tl.static_range(P):
                    added, arriving = over_channels(xs[j * P + p]), over_channels(dys[j * P + p])
                    before = decayed[j * P + p]
                    # the state of this token, and the gradient that arrives at it
                    if READ == "ones":
                        dstate = dh[p] + input_of(dys[j * P + p], (), j, n, N)
                    else:
                        seen = (before + input_of(xs[j * P + p], bs, j, n, N)) * arriving
                        if READ == "constant":
                            read_new = read_new + (dread[p] + seen,)
                            dstate = dh[p] + read[p] * arriving
                        else:
                            c_sum += seen
                            dstate = dh[p] + over_states(cs[j]) * arriving
                    if b is not None:
                        b_sum += dstate * added
                        dinput = sum_states(dstate * over_states(bs[j]))
                    else:
                        dinput = sum_states(dstate)
                    product = dstate * before
                    store_row(x_row + j * D, inside, d[p], D, dinput)
                    store_row(g_row + j * D, inside, d[p], D, sum_states(product * rates[p]))
                    rate_new = rate_new + (rate_sum[p] + product * over_channels(bounded(gs[j * P + p])),)
                    new = new + (dstate * decays[j * P + p],)
                if b is not None:
                    store_row(b_row + j * N, inside, n, N, sum_channels(b_sum))
                if READ == "each":
                    store_row(c_row + j * N, inside, n, N, sum_channels(c_sum))
                if READ == "constant":
                    dread = read_new
                dh, rate_sum = new, rate_new
        tl.debug_barrier()
    if drate is not None:
        store_states(drate, block, d, n, D, N, rate_sum)
    if READ == "constant":
        store_states(dc, block, d, n, D, N, dread)
    if dinitial is not None:
        store_states(dinitial, block, d, n, D, N, dh)
