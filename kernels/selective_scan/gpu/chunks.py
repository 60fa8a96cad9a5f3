"""The forward pass of the selective scan in Triton, and what both directions share.

A program is one warp, which walks through a block of tokens with the states of a few channels in registers. Its tile of
states [DP, NJ, LN, LD] has LN·LD lanes: a thread holds NJ states, n = ln·NJ + nj, of DP channels d = dp·LD + ld. A tile
of channels [DP, LD] has at most as many elements as a warp has threads, since Triton then loads them where they are
used, without an exchange between threads.

Where few programs would run, sequences are cut into several blocks: `walk` runs through each block from a state of
zero, `combine` computes the states at the cuts (over a block a state decays by exp(rate · Σ log_decay), whatever the
inputs), and `walk` runs through each block again from there. On its way it stores the states before all chunks.
"""

# tuples grow in loops that the compiler unrolls
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, var-annotated"
# ruff: noqa: RET505, RUF005, SIM102

import triton
import triton.language as tl

from ...core import resets
from ...gpu.overlap import wait
from ...gpu.tiles import LOG2E, exp2, segment_at

LEAST = tl.constexpr(resets.LEAST_ALONE)


@triton.jit
def places(program, D: tl.constexpr, DP: tl.constexpr, NJ: tl.constexpr, LN: tl.constexpr, LD: tl.constexpr):
    """The row of a program, its block of channels, its channels [DP, LD] and its states [NJ, LN]."""
    BLOCKS: tl.constexpr = (D + DP * LD - 1) // (DP * LD)
    column = program % BLOCKS
    d = column * (DP * LD) + tl.arange(0, DP)[:, None] * LD + tl.arange(0, LD)[None, :]
    return program // BLOCKS, column, d, tl.arange(0, NJ)[:, None] + tl.arange(0, LN)[None, :] * NJ


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
    """The numbers `at` of the steps i to i + TOKENS − 1 of a block, zeros past its end; an empty tuple for None."""
    loaded = ()
    if x is not None:
        row = row_of(x, start + (size - 1 - i if REVERSE else i), SIZE)
        for j in tl.static_range(TOKENS):
            loaded = loaded + (load_row(row + (-j if REVERSE else j) * SIZE, i + j < size, at, SIZE),)
    return loaded


@triton.jit
def load_steps(
    x, g, b, c, start, size, i, d, n, D: tl.constexpr, N: tl.constexpr, TOKENS: tl.constexpr, REVERSE: tl.constexpr
):
    """Load the tokens of the steps i to i + TOKENS − 1 of a block. Steps past its end change nothing."""
    xs = load_tokens(x, start, size, i, d, D, TOKENS, REVERSE)
    gs = load_tokens(g, start, size, i, d, D, TOKENS, REVERSE)
    bs = load_tokens(b, start, size, i, n, N, TOKENS, REVERSE)
    return xs, gs, bs, load_tokens(c, start, size, i, n, N, TOKENS, REVERSE)


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
    """The tile of a row of x [rows, D, N] in fp32, or zeros if x is None."""
    if x is None:
        return tl.zeros([d.shape[0], n.shape[0], n.shape[1], d.shape[1]], tl.float32)
    else:
        at, exists = states_at(row, d, n, D, N)
        return tl.load(x + at, mask=exists, other=0.0).to(tl.float32)


@triton.jit
def store_states(x, row, d, n, D: tl.constexpr, N: tl.constexpr, value):
    at, exists = states_at(row, d, n, D, N)
    tl.store(x + at, value, mask=exists)


@triton.jit
def over_states(x):
    """x [DP, LD] as [DP, 1, 1, LD], in the layout of `sum_states`: with another one, the compiler loads x twice."""
    return x[:, None, :][:, None, :, :]


@triton.jit
def decay_of(log_decay, rate):
    return exp2(over_states(log_decay) * (rate * LOG2E))


@triton.jit
def input_of(x, b, j: tl.constexpr, n, N: tl.constexpr):
    """x b_j, what is added to the states; without weights, b is empty, and they are ones."""
    if len(b) > 0:
        return b[j][None, :, :, None] * over_states(x)
    # states beyond N fill a tile, and are summed with the others where nothing reads them
    return tl.where((n < N)[None, :, :, None], over_states(x), 0.0)


@triton.jit
def stepped(x, step, SCALED: tl.constexpr):
    """x, or x times the step that −step is the log decay of."""
    return -step * x if SCALED else x


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
    read,
    skip,
    before,
    after,
    totals,
    states,
    y,
    blocks,
    D: tl.constexpr,
    N: tl.constexpr,
    DP: tl.constexpr,
    NJ: tl.constexpr,
    LN: tl.constexpr,
    LD: tl.constexpr,
    CHUNK: tl.constexpr,
    TOKENS: tl.constexpr,
    REVERSE: tl.constexpr,
    SCALED: tl.constexpr,  # whether inputs are scaled by the steps; not in reverse, where they are gradients
    OVERLAP: tl.constexpr,
):
    """Walk through each block from the states `before` it, or zeros, with the next TOKENS tokens loaded ahead.

    Written are, each unless it is None: the states after the block, its summed log decays, the states before each of
    its chunks, and y.

    `read` is c if it is constant. REVERSE: x is the gradient of the output, b what it is read with unless that is
    constant, and `after` the block's part of the gradient of the state before it.
    """
    wait(OVERLAP)
    block, _, d, n = places(tl.program_id(0), D, DP, NJ, LN, LD)
    start, size, chunk = block_at(blocks, block)
    rates = load_states(rate, block * 0, d, n, D, N)
    weights = load_states(read, block * 0, d, n, D, N)
    direct = load_row(skip, True, d, D) if skip is not None else None
    h = load_states(before, block, d, n, D, N)
    total = tl.zeros([DP, LD], tl.float32)
    ahead = load_steps(x, log_decay, b, c, start, size, 0, d, n, D, N, TOKENS, REVERSE)
    for i in tl.range(0, size, TOKENS):
        if states is not None:
            if i % CHUNK == 0:
                store_states(states, chunk + i // CHUNK, d, n, D, N, h)
        xs, gs, bs, cs = ahead
        ahead = load_steps(x, log_decay, b, c, start, size, i + TOKENS, d, n, D, N, TOKENS, REVERSE)
        if y is not None:
            row = row_of(y, start + i, D)
        for j in tl.static_range(TOKENS):
            step = bounded(gs[j])
            decay = decay_of(step, rates)
            if not REVERSE:
                h = h * decay + input_of(stepped(xs[j], step, SCALED), bs, j, n, N)
            elif read is not None:
                h = (h + weights * over_states(xs[j])) * decay
            else:
                h = (h + input_of(xs[j], bs, j, n, N)) * decay
            total += step
            if y is not None:
                if read is not None:
                    out = h * weights
                elif c is not None:
                    out = h * cs[j][None, :, :, None]
                else:
                    out = h
                out = sum_states(out)
                if skip is not None:
                    out += direct * xs[j]
                store_row(row + j * D, i + j < size, d, D, out)
    if after is not None:
        store_states(after, block, d, n, D, N, h)
    if totals is not None:
        store_row(row_of(totals, block, D), True, d, D, total)


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
    DP: tl.constexpr,
    NJ: tl.constexpr,
    LN: tl.constexpr,
    LD: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Replace what each block adds by the state before it, or in reverse by the gradient of the state after it."""
    row, _, d, n = places(tl.program_id(0), D, DP, NJ, LN, LD)
    start, stop, _ = segment_at(segments, row)
    first = tl.load(segments + row * 5 + 3)
    rates = load_states(rate, row * 0, d, n, D, N)
    h = load_states(end, row, d, n, D, N)
    count = tl.cdiv(stop - start, length)
    for i in tl.range(0, count):
        block = first + (count - 1 - i if REVERSE else i)
        added = load_states(states, block, d, n, D, N)
        decay = decay_of(load_row(row_of(totals, block, D), True, d, D), rates)
        store_states(states, block, d, n, D, N, h)
        h = h * decay + added
    store_states(other_end, row, d, n, D, N, h)
