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


@triton.jit(do_not_specialize=["tokens", "marks"])
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
    marks,
    D: tl.constexpr,
    N: tl.constexpr,
    DP: tl.constexpr,
    NJ: tl.constexpr,
    LN: tl.constexpr,
    LD: tl.constexpr,
    CHUNK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    block, column, d, n = places(tl.program_id(0), D, DP, NJ, LN, LD)
    start, size, chunk = block_at(blocks, block)
    rates = load_states(rate, block * 0, d, n, D, N)
    weights = load_states(read, block * 0, d, n, D, N)
    dh = load_states(after, block, d, n, D, N)
    rate_sum, dread = tl.zeros([DP, NJ, LN, LD], tl.float32), tl.zeros([DP, NJ, LN, LD], tl.float32)
    TILE: tl.constexpr = DP * NJ * LN * LD
    # numbers of one thread are contiguous: [LN, LD, DP, NJ]
    lane = tl.arange(0, LN)[:, None] * LD + tl.arange(0, LD)[None, :]
    own = tl.arange(0, DP)[:, None] * NJ + tl.arange(0, NJ)[None, :]
    scratch += tl.program_id(0).to(tl.int64) * marks * TILE
    tile = scratch + lane[None, None, :, :] * (DP * NJ) + own[:, :, None, None]
    partial = column.to(tl.int64) * tokens
    chunks = tl.cdiv(size, CHUNK)
    for k in tl.range(0, chunks):
        first = (chunks - 1 - k) * CHUNK
        stop = tl.minimum(first + CHUNK, size)
        groups = tl.cdiv(stop - first, TOKENS)
        last = first + (groups - 1) * TOKENS
        h = load_states(states, chunk + chunks - 1 - k, d, n, D, N)
        ahead = load_steps(x, log_decay, b, None, start, stop, first, d, n, D, N, TOKENS, False)
        back = load_steps(dy, None, None, c, start, stop, last, d, n, D, N, TOKENS, False)
        for i in tl.range(0, groups):
            tl.store(tile + i * TILE, h)
            if i + 1 < groups:
                xs, gs, bs, _ = ahead
                after_at = first + (i + 1) * TOKENS
                ahead = load_steps(x, log_decay, b, None, start, stop, after_at, d, n, D, N, TOKENS, False)
                for j in tl.static_range(TOKENS):
                    h = h * decay_of(bounded(gs[j]), rates) + input_of(xs[j], bs, j, n, N)
        tl.debug_barrier()
        for i in tl.range(0, groups):
            at = last - i * TOKENS
            h = tl.load(tile + (groups - 1 - i) * TILE)
            xs, gs, bs, _ = load_steps(x, log_decay, b, None, start, stop, at, d, n, D, N, TOKENS, False)
            dys, _, _, cs = back
            before_at = tl.maximum(at - TOKENS, 0)
            back = load_steps(dy, None, None, c, start, stop, before_at, d, n, D, N, TOKENS, False)
            decays, decayed = (), ()
            for j in tl.static_range(TOKENS):
                decays = decays + (decay_of(bounded(gs[j]), rates),)
                decayed = decayed + (h * decays[j],)
                h = decayed[j] + input_of(xs[j], bs, j, n, N)
            row = start + at
            x_row, g_row = row_of(dx, row, D), row_of(dlog_decay, row, D)
            for j in tl.static_range(TOKENS - 1, -1, -1):
                inside = at + j < stop
                arriving = dys[j][:, None, None, :]
                # the state of this token, and the gradient that arrives at it
                seen = (decayed[j] + input_of(xs[j], bs, j, n, N)) * arriving
                if read is not None:
                    dread += seen
                    dh += weights * arriving
                elif c is not None:
                    store_row(row_of(dc, partial + row, N) + j * N, inside, n, N, sum_channels(seen))
                    dh += cs[j][None, :, :, None] * arriving
                else:
                    dh += input_of(dys[j], (), j, n, N)
                dinput = dh
                if b is not None:
                    written = sum_channels(dh * xs[j][:, None, None, :])
                    store_row(row_of(db, partial + row, N) + j * N, inside, n, N, written)
                    dinput = dh * bs[j][None, :, :, None]
                product = dh * decayed[j]
                store_row(x_row + j * D, inside, d, D, sum_states(dinput))
                store_row(g_row + j * D, inside, d, D, sum_states(product * rates))
                rate_sum += product * bounded(gs[j])[:, None, None, :]
                dh *= decays[j]
        tl.debug_barrier()
    if drate is not None:
        store_states(drate, block, d, n, D, N, rate_sum)
    if read is not None:
        store_states(dc, block, d, n, D, N, dread)
    if dinitial is not None:
        store_states(dinitial, block, d, n, D, N, dh)
