"""The forward pass of the selective scan in Triton, and what both directions share.

Sequences are cut into chunks, which run in parallel: one program per chunk and block of channels.

`walk` runs through each chunk from a state of zero, `combine` computes the states at the cuts (over a chunk a state
decays by exp(rate · Σ log_decay), whatever the inputs), and `walk` runs through each chunk again from there. States are
tiles [states, channels] with one channel per thread, so that the read-out is a sum inside a thread.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: SIM108

import triton
import triton.language as tl

from ...core import resets
from ...gpu.tiles import chunk_at, segment_at

LEAST = tl.constexpr(resets.LEAST_ALONE)


@triton.jit
def load_token(x, token, at, SIZE: tl.constexpr):
    """The numbers `at` of a token of x [tokens, SIZE], in fp32."""
    return tl.load(x + token.to(tl.int64) * SIZE + at, mask=at < SIZE, other=0.0).to(tl.float32)


@triton.jit
def load_decay(log_decay, token, d, D: tl.constexpr):
    """The log decays of a token, finite: −inf times 0, a rate or a gradient, is not a number."""
    g = load_token(log_decay, token, d, D)
    return tl.where(g < LEAST, LEAST, g)


@triton.jit
def store_token(x, token, at, SIZE: tl.constexpr, value):
    tl.store(x + token.to(tl.int64) * SIZE + at, value.to(x.dtype.element_ty), mask=at < SIZE)


@triton.jit
def load_states(x, row, d, n, D: tl.constexpr, N: tl.constexpr):
    """The tile [states, channels] of x [rows, D, N], in fp32."""
    at = row.to(tl.int64) * (D * N) + d[None, :] * N + n[:, None]
    return tl.load(x + at, mask=(d < D)[None, :] & (n < N)[:, None], other=0.0).to(tl.float32)


@triton.jit
def store_states(x, row, d, n, D: tl.constexpr, N: tl.constexpr, value):
    at = row.to(tl.int64) * (D * N) + d[None, :] * N + n[:, None]
    tl.store(x + at, value, mask=(d < D)[None, :] & (n < N)[:, None])


@triton.jit
def advance(h, x, decay, b, token, n, N: tl.constexpr):
    """The next state: the decayed state plus the input x [channels] of this token."""
    if b is not None:
        return h * decay + load_token(b, token, n, N)[:, None] * x[None, :]
    # states beyond N fill a block, and are summed with the others where nothing reads them
    return h * decay + tl.where((n < N)[:, None], x[None, :], 0.0)


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
    y,
    chunks,
    D: tl.constexpr,
    N: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
    READ: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Walk through each chunk from the states `before` it, or zeros.

    Written are, each unless it is None: the states after the chunk, its summed log decay, and y.

    REVERSE: x is the gradient of the output, and `after` the chunk's part of the gradient of the state before it.
    """
    BLOCKS: tl.constexpr = (D + BD - 1) // BD
    chunk = tl.program_id(0) // BLOCKS
    d, n = (tl.program_id(0) % BLOCKS) * BD + tl.arange(0, BD), tl.arange(0, BN)
    start, stop = chunk_at(chunks, chunk)
    rates = load_states(rate, chunk * 0, d, n, D, N)
    if READ == "constant":
        read = load_states(c, chunk * 0, d, n, D, N)
    if before is not None:
        h = load_states(before, chunk, d, n, D, N)
    else:
        h = tl.zeros([BN, BD], tl.float32)
    total = tl.zeros([BD], tl.float32)
    for i in tl.range(0, stop - start):
        token = stop - 1 - i if REVERSE else start + i
        step = load_decay(log_decay, token, d, D)
        decay = tl.exp(step[None, :] * rates)
        added = load_token(x, token, d, D)
        if not REVERSE:
            h = advance(h, added, decay, b, token, n, N)
        elif READ == "constant":
            h = (h + read * added[None, :]) * decay
        else:
            h = advance(h, added, 1.0, c, token, n, N) * decay
        total += step
        if y is not None:
            if READ == "constant":
                out = tl.sum(h * read, 0)
            elif READ == "each":
                out = tl.sum(h * load_token(c, token, n, N)[:, None], 0)
            else:
                out = tl.sum(h, 0)
            store_token(y, token, d, D, out)
    if after is not None:
        store_states(after, chunk, d, n, D, N, h)
    if totals is not None:
        tl.store(totals + chunk.to(tl.int64) * D + d, total, mask=d < D)


@triton.jit(do_not_specialize=["length"])
def combine(
    rate,
    states,
    totals,
    end,
    other_end,
    segments,
    length,  # tokens of a chunk
    D: tl.constexpr,
    N: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Replace what each chunk adds by the state before it, or in reverse by the gradient of the state after it."""
    BLOCKS: tl.constexpr = (D + BD - 1) // BD
    row = tl.program_id(0) // BLOCKS
    d, n = (tl.program_id(0) % BLOCKS) * BD + tl.arange(0, BD), tl.arange(0, BN)
    start, stop, first = segment_at(segments, row)
    rates = load_states(rate, row * 0, d, n, D, N)
    if end is not None:
        h = load_states(end, row, d, n, D, N)
    else:
        h = tl.zeros([BN, BD], tl.float32)
    count = tl.cdiv(stop - start, length)
    for i in tl.range(0, count):
        chunk = first + (count - 1 - i if REVERSE else i)
        added = load_states(states, chunk, d, n, D, N)
        decay = tl.exp(tl.load(totals + chunk.to(tl.int64) * D + d, mask=d < D, other=0.0)[None, :] * rates)
        store_states(states, chunk, d, n, D, N, h)
        h = h * decay + added
    store_states(other_end, row, d, n, D, N, h)
