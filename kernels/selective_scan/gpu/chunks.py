"""The forward pass of the selective scan in Triton, and what both directions share.

A program is one warp, which walks through a block of tokens with the states of a few channels in registers. Its tiles
of states [DP, NJ, LN, LD] have LN·LD lanes: a thread holds NJ states, n = ln·NJ + nj, of DP channels d = dp·LD + ld. It
holds P tiles, whose products with x and c are added before sums over lanes. Tiles of channels have fewer elements than
a warp has threads, since Triton then loads them where they are used, without an exchange between threads.

Where few programs would run, sequences are cut into several blocks: `walk` runs through each block from a state of
zero, `combine` computes the states at the cuts (over a block a state decays by exp(rate · Σ log_decay), whatever the
inputs), and `walk` runs through each block again from there. On its way it stores the states before all chunks.
"""

# tuples grow in loops that the compiler unrolls
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, var-annotated"
# ruff: noqa: RUF005, SIM102

import triton
import triton.language as tl

from ...core import resets
from ...gpu.tiles import LOG2E, exp2, segment_at

LEAST = tl.constexpr(resets.LEAST_ALONE)


@triton.jit
def places(
    program, D: tl.constexpr, P: tl.constexpr, DP: tl.constexpr, NJ: tl.constexpr, LN: tl.constexpr, LD: tl.constexpr
):
    """The row of a program, its block of channels, the channels of its P tiles, and the states of each."""
    BLOCKS: tl.constexpr = (D + P * DP * LD - 1) // (P * DP * LD)
    d = ()
    for p in tl.static_range(P):
        first = (program % BLOCKS * P + p) * DP * LD
        d = d + (first + tl.arange(0, DP)[:, None] * LD + tl.arange(0, LD)[None, :],)
    return program // BLOCKS, program % BLOCKS, d, tl.arange(0, NJ)[:, None] + tl.arange(0, LN)[None, :] * NJ


@triton.jit
def block_at(blocks, block):
    """First token of a block of a layout, its number of tokens, and its first chunk."""
    return tl.load(blocks + block * 3), tl.load(blocks + block * 3 + 1), tl.load(blocks + block * 3 + 2)


@triton.jit
def row_of(x, token, SIZE: tl.constexpr):
    """A pointer to a row of x [rows, SIZE]."""
    return x + token.to(tl.int64) * SIZE


@triton.jit
def load_row(x, inside, at, SIZE: tl.constexpr):
    """The numbers `at` of a row of SIZE numbers, in fp32; zeros if it is not inside."""
    return tl.load(x + at, mask=(at < SIZE) & inside, other=0.0).to(tl.float32)


@triton.jit
def store_row(x, inside, at, SIZE: tl.constexpr, value):
    tl.store(x + at, value.to(x.dtype.element_ty), mask=(at < SIZE) & inside)


@triton.jit
def load_tokens(x, start, size, i, at, SIZE: tl.constexpr, TOKENS: tl.constexpr, REVERSE: tl.constexpr):
    """The numbers at each of the tuple `at` of the steps i, i + 1 … i + TOKENS − 1 of a block; none if x is None.

    Past the end of the block all are zeros, with which a step changes nothing.
    """
    loaded = ()
    if x is not None:
        row = row_of(x, start + (size - 1 - i if REVERSE else i), SIZE)
        for j in tl.static_range(TOKENS):
            for p in tl.static_range(len(at)):
                loaded = loaded + (load_row(row + (-j if REVERSE else j) * SIZE, i + j < size, at[p], SIZE),)
    return loaded


@triton.jit
def bounded(log_decay):
    """Finite log decays: −inf times 0, a rate or a gradient, is not a number."""
    return tl.where(log_decay < LEAST, LEAST, log_decay)


@triton.jit
def states_at(row, d, n, D: tl.constexpr, N: tl.constexpr):
    """Offsets [DP, NJ, LN, LD] of states in a tensor [rows, D, N], and which of them exist."""
    at = row.to(tl.int64) * (D * N) + d[:, None, None, :] * N + n[None, :, :, None]
    return at, (d < D)[:, None, None, :] & (n < N)[None, :, :, None]


@triton.jit
def load_states(x, row, d, n, D: tl.constexpr, N: tl.constexpr):
    """The tiles of a row of x [rows, D, N] in fp32, or zeros if x is None."""
    tiles = ()
    for p in tl.static_range(len(d)):
        if x is None:
            tiles = tiles + (tl.zeros([d[p].shape[0], n.shape[0], n.shape[1], d[p].shape[1]], tl.float32),)
        else:
            at, exists = states_at(row, d[p], n, D, N)
            tiles = tiles + (tl.load(x + at, mask=exists, other=0.0).to(tl.float32),)
    return tiles


@triton.jit
def store_states(x, row, d, n, D: tl.constexpr, N: tl.constexpr, tiles):
    for p in tl.static_range(len(d)):
        at, exists = states_at(row, d[p], n, D, N)
        tl.store(x + at, tiles[p], mask=exists)


@triton.jit
def over_channels(x):
    """x [DP, LD], for a tile of states."""
    return x[:, None, None, :]


@triton.jit
def over_states(x):
    """x [NJ, LN], for a tile of states."""
    return x[None, :, :, None]


@triton.jit
def decay_of(log_decay, rate):
    return exp2(over_channels(log_decay) * (rate * LOG2E))


@triton.jit
def input_of(x, b, j: tl.constexpr, n, N: tl.constexpr):
    """x b_j, what is added to the states; without weights, b is empty, and they are ones."""
    if len(b) > 0:
        return over_states(b[j]) * over_channels(x)
    # states beyond N fill a block, and are summed with the others where nothing reads them
    return tl.where(over_states(n < N), over_channels(x), 0.0)


@triton.jit
def sum_states(x):
    """The sums [DP, LD] over all states."""
    return tl.sum(tl.sum(x, 1), 1)


@triton.jit
def walk(
    x,
    log_decay,
    rate,
    b,
    c,
    before,
    after,
    totals,
    states,
    y,
    blocks,
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
    REVERSE: tl.constexpr,
):
    """Walk through each block from the states `before` it, or zeros, with the next TOKENS tokens loaded ahead.

    Written are, each unless it is None: the states after the block, its summed log decays, the states before each of
    its chunks, and y.

    REVERSE: x is the gradient of the output, b the weights it is read with, or c if they are constant, and `after` the
    block's part of the gradient of the state before it.
    """
    block, _, d, n = places(tl.program_id(0), D, P, DP, NJ, LN, LD)
    start, size, chunk = block_at(blocks, block)
    rates = load_states(rate, block * 0, d, n, D, N)
    h = load_states(before, block, d, n, D, N)
    if READ == "constant":
        read = load_states(c, block * 0, d, n, D, N)
    total = ()
    for _ in tl.static_range(P):
        total = total + (tl.zeros([DP, LD], tl.float32),)
    next_x = load_tokens(x, start, size, 0, d, D, TOKENS, REVERSE)
    next_g = load_tokens(log_decay, start, size, 0, d, D, TOKENS, REVERSE)
    next_b, next_c = load_tokens(b, start, size, 0, (n,), N, TOKENS, REVERSE), ()
    if READ == "each":
        next_c = load_tokens(c, start, size, 0, (n,), N, TOKENS, REVERSE)
    for i in tl.range(0, size, TOKENS):
        if states is not None:
            if i % CHUNK == 0:
                store_states(states, chunk + i // CHUNK, d, n, D, N, h)
        xs, gs, bs, cs = next_x, next_g, next_b, next_c
        next_x = load_tokens(x, start, size, i + TOKENS, d, D, TOKENS, REVERSE)
        next_g = load_tokens(log_decay, start, size, i + TOKENS, d, D, TOKENS, REVERSE)
        next_b = load_tokens(b, start, size, i + TOKENS, (n,), N, TOKENS, REVERSE)
        if READ == "each":
            next_c = load_tokens(c, start, size, i + TOKENS, (n,), N, TOKENS, REVERSE)
        if y is not None:
            row = row_of(y, start + i, D)
        for j in tl.static_range(TOKENS):
            new, summed = (), ()
            for p in tl.static_range(P):
                step = bounded(gs[j * P + p])
                decay = decay_of(step, rates[p])
                if REVERSE and READ == "constant":
                    state = (h[p] + read[p] * over_channels(xs[j * P + p])) * decay
                elif REVERSE:
                    state = (h[p] + input_of(xs[j * P + p], bs, j, n, N)) * decay
                else:
                    state = h[p] * decay + input_of(xs[j * P + p], bs, j, n, N)
                new, summed = new + (state,), summed + (total[p] + step,)
                if y is not None:
                    if READ == "constant":
                        out = sum_states(state * read[p])
                    elif READ == "each":
                        out = sum_states(state * over_states(cs[j]))
                    else:
                        out = sum_states(state)
                    store_row(row + j * D, i + j < size, d[p], D, out)
            h, total = new, summed
    if after is not None:
        store_states(after, block, d, n, D, N, h)
    if totals is not None:
        for p in tl.static_range(P):
            store_row(row_of(totals, block, D), True, d[p], D, total[p])


@triton.jit(do_not_specialize=["length"])
def combine(
    rate,
    states,
    totals,
    end,
    other_end,
    segments,
    length,  # tokens of a block
    D: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    DP: tl.constexpr,
    NJ: tl.constexpr,
    LN: tl.constexpr,
    LD: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Replace what each block adds by the state before it, or in reverse by the gradient of the state after it."""
    row, _, d, n = places(tl.program_id(0), D, P, DP, NJ, LN, LD)
    start, stop, _ = segment_at(segments, row)
    first = tl.load(segments + row * 5 + 3)
    rates = load_states(rate, row * 0, d, n, D, N)
    h = load_states(end, row, d, n, D, N)
    count = tl.cdiv(stop - start, length)
    for i in tl.range(0, count):
        block = first + (count - 1 - i if REVERSE else i)
        added = load_states(states, block, d, n, D, N)
        store_states(states, block, d, n, D, N, h)
        new = ()
        for p in tl.static_range(P):
            total = load_row(row_of(totals, block, D), True, d[p], D)
            new = new + (h[p] * decay_of(total, rates[p]) + added[p],)
        h = new
    store_states(other_end, row, d, n, D, N, h)
