"""Decays per channel between the tokens of a chunk, by halves (`halves.py`), in Gluon: Hopper, eight warps, bf16.

Tiles have 64 tokens and 64 channels. A warp has a block of 8 tokens, a thread all 8 of 2 channels (layout `OCTETS`). So
factors are products of decays inside a thread, without exponentials at each level, and only the totals of the eight
blocks pass through shared memory.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from .gluon_tiles import OF_COLUMNS, OF_ROWS, async_load, at_tile, barrier, last_steps, opaque

LEVELS = gl.constexpr(6)
LOG2E = gl.constexpr(1.4426950408889634)
LEAST = gl.constexpr(-152.0)  # as in `tiles.py`
SCALE, UNSCALED = gl.constexpr(2.0**15), gl.constexpr(2.0**-30)  # of a factor; of products of two
OCTETS = gl.constexpr(gl.BlockedLayout([8, 2], [1, 32], [8, 1], [1, 0]))
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))  # 16 bytes a thread, rows of 64
LINE = gl.constexpr(gl.BlockedLayout([2], [32], [8], [0]))


@gluon.jit
def rows():
    """Numbers of the rows of a tile [64, 64] in the layout `PAIRS`, as a column."""
    return gl.expand_dims(opaque(gl.arange(0, 64, OF_ROWS)), 1)


@gluon.jit
def columns():
    """Numbers of the columns of a tile in the layout `PAIRS`, as a row."""
    return gl.expand_dims(opaque(gl.arange(0, 64, OF_COLUMNS)), 0)


@gluon.jit
def is_second(level):
    """Return whether each row, in the layout `PAIRS`, is in the second half of a block of this level."""
    return (rows() & (32 >> level)) != 0


@gluon.jit
def separated(level):
    """Return whether the tokens of each pair are in different halves of one block of this level."""
    return ((rows() ^ columns()) >> (5 - level)) == 1


@gluon.jit
def addresses(x, start, column, stride: gl.constexpr, LAYOUT: gl.constexpr, STEPS: gl.constexpr = 1):
    """Addresses of the tile [64, 64] that begins at a row and a column; `STEPS` rows share a row of x."""
    return at_tile(x, start, column, stride, LAYOUT, 64, 64, STEPS)


@gluon.jit
def copy_rows(shared, x, start, column, stop, stride: gl.constexpr, STEPS: gl.constexpr = 1):
    """Start to copy a tile [64, 64] of rows from `start` on, as `copy_tokens` does for 128 channels."""
    r = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, COPY)), 1)
    async_load(shared, addresses(x, start, column, stride, COPY, STEPS), mask=last_steps(r, start, stop, STEPS))


@gluon.jit
def copy_square(shared, x, row, column, stride: gl.constexpr):
    """Start to copy a whole tile [64, 64]."""
    async_load(shared, addresses(x, row, column, stride, COPY))


@gluon.jit
def store_rows(x, start, column, stop, stride: gl.constexpr, value, STEPS: gl.constexpr = 1):
    """Store a tile [64, 64] in bf16; of `STEPS` rows per token, only the last."""
    tile = gl.convert_layout(value.to(gl.bfloat16), OCTETS)
    r = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, OCTETS)), 1)
    gl.store(addresses(x, start, column, stride, OCTETS, STEPS), tile, mask=last_steps(r, start, stop, STEPS))


@gluon.jit
def exp2(x):
    """2^x, 0 below 2^−126."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def load_log_decays(log_decay, start, column, stop, stride: gl.constexpr, STEPS: gl.constexpr):
    """Log2 decays [64, 64] of rows, 0 for those that are not the first step of a token."""
    r = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, OCTETS)), 1)
    mask = r < stop - start
    if STEPS > 1:
        mask = mask & ((start + r) % STEPS == 0)
    g = gl.load(addresses(log_decay, start, column, stride, OCTETS, STEPS), mask=mask, other=0.0)
    return gl.maximum(g.to(gl.float32) * LOG2E, LEAST)


@gluon.jit
def load_decays(log_decay, start, column, stop, stride: gl.constexpr, STEPS: gl.constexpr):
    """Decays e^g [64, 64] of rows, 1 for those that are not the first step of a token."""
    return exp2(load_log_decays(log_decay, start, column, stop, stride, STEPS))


@gluon.jit
def product(x, y):
    return x * y


@gluon.jit
def truncated(x):
    """x in fp32 with the digits of bf16."""
    return gl.inline_asm_elementwise("and.b32 $0, $1, 0xffff0000;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def store_parts(shared, x, FIRST: gl.constexpr = 0):
    """Store a tile in fp32 as the sum of two tiles in bf16, numbers `FIRST` and the next."""
    high = truncated(x)
    shared.index(FIRST).store(high.to(gl.bfloat16))
    shared.index(FIRST + 1).store((x - high).to(gl.bfloat16))


@gluon.jit
def add_twice(ones, parts, sums, FIRST: gl.constexpr = 0):
    """Start to add the product of ones and a tile that was stored in two parts."""
    sums = warpgroup_mma(ones, parts.index(FIRST + 1), sums, is_async=True)
    return warpgroup_mma(ones, parts.index(FIRST), sums, is_async=True)


@gluon.jit
def in_second(x, HALF: gl.constexpr):
    """Return whether each row of blocks x [64 / (2 HALF), 2 HALF, 64] is in the second half."""
    LAYOUT: gl.constexpr = x.type.layout
    r = gl.arange(0, 2 * HALF, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    return gl.expand_dims(gl.expand_dims(r, 0), 2) >= HALF


@gluon.jit
def in_blocks(x, ROWS: gl.constexpr):
    return gl.reshape(x, [64 // ROWS, ROWS, 64])


@gluon.jit
def as_tile(x):
    return gl.convert_layout(gl.reshape(x, [64, 64]), OCTETS)


@gluon.jit
def factor_inside(until, after, HALF: gl.constexpr):
    """Decays between each token and the boundary in its block of 2 · HALF tokens, at most 8.

    Args:
        until: Product of the decays from the start of a block of HALF tokens to each token.
        after: From after it to the end of the block.
        HALF: Tokens of half a block.
    """
    u = in_blocks(until, 2 * HALF)
    return as_tile(gl.where(in_second(u, HALF), u, in_blocks(after, 2 * HALF)))


@gluon.jit
def at_row(x, ROW: gl.constexpr):
    """Row ROW of blocks x [n, rows, 64], as [n, 1, 64]."""
    LAYOUT: gl.constexpr = x.type.layout
    r = gl.arange(0, x.shape[1], gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    here = gl.expand_dims(gl.expand_dims(r, 0), 2) == ROW
    return gl.expand_dims(gl.reduce(gl.where(here, x, 1.0), 1, product), 1)


@gluon.jit
def doubled(until, after, HALF: gl.constexpr):
    """`until` and `after` for blocks of 2 · HALF tokens."""
    u, a = in_blocks(until, 2 * HALF), in_blocks(after, 2 * HALF)
    second = in_second(u, HALF)
    of_first, of_second = at_row(u, HALF - 1), at_row(u, 2 * HALF - 1)
    return as_tile(gl.where(second, u * of_first, u)), as_tile(gl.where(second, a, a * of_second))


@gluon.jit
def doubled_before(past, until, HALF: gl.constexpr):
    """Decays from the start of blocks of 2 · HALF tokens to before each token, from those of blocks of HALF tokens."""
    x, u = in_blocks(past, 2 * HALF), in_blocks(until, 2 * HALF)
    return as_tile(gl.where(in_second(u, HALF), x * at_row(u, HALF - 1), x))


@gluon.jit
def store_totals(totals, until):
    """Store the decays of the eight blocks of 8 tokens, 64 numbers each, for `until` of such blocks."""
    u = in_blocks(until, 8)
    LAYOUT: gl.constexpr = u.type.layout
    r = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    last = gl.where(gl.expand_dims(gl.expand_dims(r, 0), 2) == 7, u, 1.0)
    totals.store(gl.convert_layout(gl.reshape(gl.reduce(last, 1, product), [512]), LINE))


@gluon.jit
def total_of(totals, BLOCK: gl.constexpr, LAYOUT: gl.constexpr):
    """The product of the decays of a block of 8 tokens [1, 64]."""
    return gl.expand_dims(totals.slice(BLOCK * 64, 64).load(gl.SliceLayout(0, LAYOUT)), 0)


@gluon.jit
def across(totals, tile, FROM: gl.constexpr, TO: gl.constexpr):
    """Per block of 8 tokens, the decays of the blocks between it and the boundary before block (FROM + TO) / 2.

    Only for blocks from FROM to TO; others have 1. With FROM = TO, all blocks before each block; with TO < FROM, after.
    """
    blocks = in_blocks(tile, 8)
    LAYOUT: gl.constexpr = gl.SliceLayout(1, blocks.type.layout)
    w = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(1, LAYOUT)), 1)
    decays = gl.zeros([8, 64], gl.float32, LAYOUT) + 1.0
    for block in gl.static_range(8):
        t = total_of(totals, block, LAYOUT)
        if FROM == TO:
            decays *= gl.where(w > block, t, 1.0)
        elif TO < FROM:
            decays *= gl.where(w < block, t, 1.0)
        elif block >= FROM and block < TO:
            if block < (FROM + TO) // 2:
                decays *= gl.where((w >= FROM) & (w < block), t, 1.0)
            else:
                decays *= gl.where((w > block) & (w < TO), t, 1.0)
    return gl.expand_dims(decays, 1)


@gluon.jit
def from_start(until, totals):
    """Decays from the start of the chunk to each token, for `until` of blocks of 8."""
    return as_tile(in_blocks(until, 8) * across(totals, until, 0, 0))


@gluon.jit
def to_end(after, totals):
    """Decays from after each token to the end of the chunk."""
    return as_tile(in_blocks(after, 8) * across(totals, after, 8, 0))


@gluon.jit
def of_chunk(totals, LAYOUT: gl.constexpr):
    """The decays of the whole chunk [64]."""
    decay = totals.slice(0, 64).load(LAYOUT)
    for block in gl.static_range(1, 8):
        decay = decay * totals.slice(block * 64, 64).load(LAYOUT)
    return decay


@gluon.jit
def factor_across(until, after, totals, LEVEL: gl.constexpr):
    """Decays between each token and the boundary in its block, for levels 0 to 2.

    `until` and `after` are those of blocks of 8 tokens.
    """
    HALF: gl.constexpr = 4 >> LEVEL  # blocks of 8 in half a block
    u = in_blocks(until, 8)
    LAYOUT: gl.constexpr = u.type.layout
    w = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    second = (gl.expand_dims(gl.expand_dims(w, 1), 2) & HALF) != 0
    nearest = gl.where(second, u, in_blocks(after, 8))
    if LEVEL == 0:
        nearest = nearest * across(totals, until, 0, 8)
    elif LEVEL == 1:
        nearest = nearest * (across(totals, until, 0, 4) * across(totals, until, 4, 8))
    return as_tile(nearest)


@gluon.jit
def store_factors(factors, totals, decay, BEFORE: gl.constexpr):
    """Store `SCALE` times the decays between each token and the boundary in its block, for all levels.

    Factors are at most 1: with this scale, fp16 keeps eleven digits down to 2^−29, and the last one at 2^−39.

    Args:
        factors: Six tiles in fp16, the first of which is that of level 0; with `BEFORE` six more, in which tokens of
            second halves leave out their own decay.
        totals: 512 numbers in shared memory.
        decay: Decays of the tokens.
        BEFORE: Whether erase keys read the state before it decays.

    Returns:
        Decays from the start of blocks of 8 tokens to each token, from after it to the end, and to before it.
    """
    ones = gl.zeros([64, 64], gl.float32, OCTETS) + 1.0
    until, after, past = decay, ones, ones
    for exponent in gl.static_range(3):
        factors.index(5 - exponent).store((factor_inside(until, after, 1 << exponent) * SCALE).to(gl.float16))
        if BEFORE:
            factors.index(11 - exponent).store((factor_inside(past, after, 1 << exponent) * SCALE).to(gl.float16))
            past = doubled_before(past, until, 1 << exponent)
        until, after = doubled(until, after, 1 << exponent)
    store_totals(totals, until)
    barrier()
    for level in gl.static_range(3):
        factors.index(level).store((factor_across(until, after, totals, level) * SCALE).to(gl.float16))
        if BEFORE:
            factors.index(6 + level).store((factor_across(past, after, totals, level) * SCALE).to(gl.float16))
    return until, after, past
