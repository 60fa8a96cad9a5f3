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
    load_steps,
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
    read,
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
):
    block, column, d, n = places(tl.program_id(0), D, P, DP, NJ, LN, LD)
    start, size, chunk = block_at(blocks, block)
    rates = load_states(rate, block * 0, d, n, D, N)
    dh = load_states(after, block, d, n, D, N)
    zeros = load_states(None, block, d, n, D, N)
    rate_sum, dread = zeros, zeros
    weights = load_states(read, block * 0, d, n, D, N)
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
        last = first + (groups - 1) * TOKENS
        ahead = load_steps(x, log_decay, b, None, start, stop, first, d, n, D, N, TOKENS, False)
        back = load_steps(dy, None, None, c, start, stop, last, d, n, D, N, TOKENS, False)
        for i in tl.range(0, groups):
            for p in tl.static_range(P):
                tl.store(tile + (i * P + p) * TILE, h[p])
            if i + 1 < groups:
                xs, gs, bs, _ = ahead
                after_at = first + (i + 1) * TOKENS
                ahead = load_steps(x, log_decay, b, None, start, stop, after_at, d, n, D, N, TOKENS, False)
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
            xs, gs, bs, _ = load_steps(x, log_decay, b, None, start, stop, at, d, n, D, N, TOKENS, False)
            dys, _, _, cs = back
            before_at = tl.maximum(at - TOKENS, 0)
            back = load_steps(dy, None, None, c, start, stop, before_at, d, n, D, N, TOKENS, False)
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
            if c is not None:
                c_row = row_of(dc, partial + row, N)
            for j in tl.static_range(TOKENS - 1, -1, -1):
                inside = at + j < stop
                new, rate_new, read_new = (), (), ()
                b_sum, c_sum = tl.zeros([DP, NJ, LN, LD], tl.float32), tl.zeros([DP, NJ, LN, LD], tl.float32)
                for p in tl.static_range(P):
                    added, arriving = xs[j * P + p][:, None, None, :], dys[j * P + p][:, None, None, :]
                    before = decayed[j * P + p]
                    # the state of this token, and the gradient that arrives at it
                    seen = (before + input_of(xs[j * P + p], bs, j, n, N)) * arriving
                    if read is not None:
                        read_new = read_new + (dread[p] + seen,)
                        dstate = dh[p] + weights[p] * arriving
                    elif c is not None:
                        c_sum += seen
                        dstate = dh[p] + cs[j][None, :, :, None] * arriving
                    else:
                        dstate = dh[p] + input_of(dys[j * P + p], (), j, n, N)
                    dinput = dstate
                    if b is not None:
                        b_sum += dstate * added
                        dinput *= bs[j][None, :, :, None]
                    product = dstate * before
                    store_row(x_row + j * D, inside, d[p], D, sum_states(dinput))
                    store_row(g_row + j * D, inside, d[p], D, sum_states(product * rates[p]))
                    rate_new = rate_new + (rate_sum[p] + product * bounded(gs[j * P + p])[:, None, None, :],)
                    new = new + (dstate * decays[j * P + p],)
                if b is not None:
                    store_row(b_row + j * N, inside, n, N, sum_channels(b_sum))
                if c is not None:
                    store_row(c_row + j * N, inside, n, N, sum_channels(c_sum))
                if read is not None:
                    dread = read_new
                dh, rate_sum = new, rate_new
        tl.debug_barrier()
    if drate is not None:
        store_states(drate, block, d, n, D, N, rate_sum)
    if read is not None:
        store_states(dc, block, d, n, D, N, dread)
    if dinitial is not None:
        store_states(dinitial, block, d, n, D, N, dh)
