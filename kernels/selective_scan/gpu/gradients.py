"""The gradients of the selective scan in Triton, block by block, from the states before all chunks.

Running backward in time needs the states in reverse, and undoing a decay would amplify rounding errors. So a program,
chunk by chunk from the last, first runs forward and stores the state before every TOKENS tokens; then, from the last
of these, it runs forward again, with the states of these tokens in registers, and then backward:

    dh_t += c_t dy_t      dc_t = Σ_d dy_t h_t      dx_t = Σ_n dh_t b_t      db_t = Σ_d dh_t x_t
    s_t = dh_t ⊙ e^{log_decay_t rate} h_{t−1}      dlog_decay_t = Σ_n s_t rate      drate = Σ_t s_t log_decay_t
    dh_{t−1} = dh_t ⊙ e^{log_decay_t rate}

of inputs x, which are part of a product with −log_decay_t if they are scaled. A skip connection adds skip dy_t to dx_t.

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
    load_row,
    load_states,
    load_steps,
    over_states,
    places,
    row_of,
    stepped,
    store_row,
    store_states,
    sum_states,
)


@triton.jit
def fold(a, b, BIT: tl.constexpr):
    """Sums over pairs of lanes, along the last axis: of a in the lanes without this bit, of b in the others."""
    lane = tl.arange(0, a.shape[2])[None, None, :]
    other, first = tl.broadcast_to(lane ^ BIT, a.shape), (lane & BIT) == 0
    return tl.where(first, a, b) + tl.gather(tl.where(first, b, a), other, 2)


@triton.jit
def store_sums(parts, items, row, stop, n, stride, N: tl.constexpr, TOKENS: tl.constexpr):
    """Store the sums over the lanes of items [NJ, LN, LD], TOKENS for each tensor, whose parts are `stride` apart.

    Each exchange between lanes halves the number of items that a lane holds.
    """
    LD: tl.constexpr = items[0].shape[2]
    FOLDS: tl.constexpr = LD if len(items) > LD else len(items)  # items that end up next to each other, in LD lanes
    for level in tl.static_range(5):
        if 1 << level < FOLDS:
            folded = ()
            for i in tl.static_range(len(items) // 2):
                folded = folded + (fold(items[2 * i], items[2 * i + 1], 1 << level),)
            items = folded
    for i in tl.static_range(len(items)):
        sums = tl.sum(tl.reshape(items[i], [n.shape[0], n.shape[1], LD // FOLDS, FOLDS]), 2)
        item = i * FOLDS + tl.arange(0, FOLDS)[None, None, :]
        token = row + item % TOKENS
        at = item // TOKENS * stride + token * N + n[:, :, None]
        tl.store(parts + at, sums, mask=(token < stop) & (n < N)[:, :, None])


@triton.jit(do_not_specialize=["tokens", "marks"])
def gradients(
    x,
    log_decay,
    rate,
    b,
    c,
    read,
    skip,
    states,
    after,
    dy,
    scratch,
    dx,
    dlog_decay,
    drate,
    parts,  # [blocks of channels, b and c or one of them, tokens, N]: to be summed
    dread,
    dskip,
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
    SCALED: tl.constexpr,  # whether inputs are scaled by the steps
):
    block, column, d, n = places(tl.program_id(0), D, DP, NJ, LN, LD)
    start, size, chunk = block_at(blocks, block)
    rates = load_states(rate, block * 0, d, n, D, N)
    weights = load_states(read, block * 0, d, n, D, N)
    dh = load_states(after, block, d, n, D, N)
    rate_sum, read_sum = tl.zeros([DP, NJ, LN, LD], tl.float32), tl.zeros([DP, NJ, LN, LD], tl.float32)
    if skip is not None:
        direct, skip_sum = load_row(skip, True, d, D), tl.zeros([DP, LD], tl.float32)
    TILE: tl.constexpr = DP * NJ * LN * LD
    # numbers of one thread are contiguous: [LN, LD, DP, NJ]
    lane = tl.arange(0, LN)[:, None] * LD + tl.arange(0, LD)[None, :]
    own = tl.arange(0, DP)[:, None] * NJ + tl.arange(0, NJ)[None, :]
    scratch += tl.program_id(0).to(tl.int64) * marks * TILE
    tile = scratch + lane[None, None, :, :] * (DP * NJ) + own[:, :, None, None]
    stride = tokens.to(tl.int64) * N
    if parts is not None:
        parts += column * stride * (2 if b is not None and c is not None else 1)
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
                    step = bounded(gs[j])
                    h = h * decay_of(step, rates) + input_of(stepped(xs[j], step, SCALED), bs, j, n, N)
        tl.debug_barrier()
        h_next = h  # loaded one group ahead
        for i in tl.range(0, groups):
            at = last - i * TOKENS
            h = h_next
            h_next = tl.load(tile + tl.maximum(groups - 2 - i, 0) * TILE)
            xs, gs, bs, _ = load_steps(x, log_decay, b, None, start, stop, at, d, n, D, N, TOKENS, False)
            dys, _, _, cs = back
            before_at = tl.maximum(at - TOKENS, 0)
            back = load_steps(dy, None, None, c, start, stop, before_at, d, n, D, N, TOKENS, False)
            decays, decayed, inputs = (), (), ()
            for j in tl.static_range(TOKENS):
                step = bounded(gs[j])
                decays = decays + (decay_of(step, rates),)
                decayed = decayed + (h * decays[j],)
                inputs = inputs + (stepped(xs[j], step, SCALED),)
                h = decayed[j] + input_of(inputs[j], bs, j, n, N)
            row = start + at
            x_row, g_row = row_of(dx, row, D), row_of(dlog_decay, row, D)
            of_b, of_c = (), ()
            for j in tl.static_range(TOKENS - 1, -1, -1):
                inside = at + j < stop
                arriving = over_states(dys[j])
                # the state of this token, and the gradient that arrives at it
                seen = (decayed[j] + input_of(inputs[j], bs, j, n, N)) * arriving
                if read is not None:
                    read_sum += seen
                    dh += weights * arriving
                elif c is not None:
                    of_c = (tl.sum(seen, 0),) + of_c
                    dh += cs[j][None, :, :, None] * arriving
                else:
                    dh += input_of(dys[j], (), j, n, N)
                dinput = dh
                if b is not None:
                    of_b = (tl.sum(dh * over_states(inputs[j]), 0),) + of_b
                    dinput = dh * bs[j][None, :, :, None]
                product = dh * decayed[j]
                step, of_input, of_step = bounded(gs[j]), sum_states(dinput), sum_states(product * rates)
                if SCALED:
                    of_step -= of_input * xs[j]
                of_input = stepped(of_input, step, SCALED)
                if skip is not None:
                    of_input += direct * dys[j]
                    skip_sum += xs[j] * dys[j]
                store_row(x_row + j * D, inside, d, D, of_input)
                store_row(g_row + j * D, inside, d, D, of_step)
                rate_sum += product * over_states(step)
                dh *= decays[j]
            if len(of_b + of_c) > 0:
                store_sums(parts, of_b + of_c, row, start + stop, n, stride, N, TOKENS)
        tl.debug_barrier()
    if drate is not None:
        store_states(drate, block, d, n, D, N, rate_sum)
    if read is not None:
        store_states(dread, block, d, n, D, N, read_sum)
    if dskip is not None:
        store_row(row_of(dskip, block, D), True, d, D, skip_sum)
    if dinitial is not None:
        store_states(dinitial, block, d, n, D, N, dh)
