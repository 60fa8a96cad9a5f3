"""Decays per channel between the tokens of a chunk, by halves (`halves.py`), in Gluon: Hopper, eight warps, bf16.

Tiles have 64 tokens and 64 channels, in the layout `PAIRS`, where the 16 tokens of a block are in one warp. Sums of
decays come from products with triangles of ones, for blocks of 16 tokens: from the start of the block to a token, and
from there to its end. So the sums at the boundaries inside a block are in other lanes of a warp, and only the totals of
the blocks pass through shared memory.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: SIM108

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from .gluon_tiles import OF_COLUMNS, OF_ROWS, PAIRS, async_load, at_tile, last_steps, opaque

LEVELS = gl.constexpr(6)
LOG2E = gl.constexpr(1.4426950408889634)
LEAST = gl.constexpr(-152.0)  # as in `tiles.py`
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))  # 16 bytes a thread, rows of 64
COPY_DECAYS = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [8, 1], [1, 0]))
OF_TOTALS = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
# as `PAIRS`, but each thread has 4 neighbouring columns
QUADS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 16], [8, 0]],
        [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0], [0, 32]],
        [],
        [64, 64],
    )
)


@gluon.jit
def rows():
    """Numbers of the rows of a tile [64, 64], as a column."""
    return gl.expand_dims(opaque(gl.arange(0, 64, OF_ROWS)), 1)


@gluon.jit
def columns():
    """Numbers of the columns of a tile, as a row."""
    return gl.expand_dims(opaque(gl.arange(0, 64, OF_COLUMNS)), 0)


@gluon.jit
def is_second(level):
    """Which rows are in the second half of a block of this level."""
    return (rows() & (32 >> level)) != 0


@gluon.jit
def separated(level):
    """Which pairs of tokens are in different halves of one block of this level."""
    return ((rows() ^ columns()) >> (5 - level)) == 1


@gluon.jit
def copy_rows(shared, x, start, column, stop, stride: gl.constexpr, STEPS: gl.constexpr = 1):
    """Start to copy a tile [64, 64] of rows from `start` on, as `copy_tokens` does for 128 channels."""
    r = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, COPY)), 1)
    at = at_tile(x, start, column, stride, COPY, 64, 64, STEPS)
    async_load(shared, at, mask=last_steps(r, start, stop, STEPS))


@gluon.jit
def copy_square(shared, x, row, column, stride: gl.constexpr):
    """Start to copy a whole tile [64, 64]."""
    async_load(shared, at_tile(x, row, column, stride, COPY, 64, 64))


@gluon.jit
def store_rows(x, start, column, stop, stride: gl.constexpr, value, STEPS: gl.constexpr = 1):
    """Store a tile [64, 64] in bf16; of `STEPS` rows per token, only the last."""
    tile = gl.convert_layout(value.to(gl.bfloat16), QUADS)
    r = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, QUADS)), 1)
    gl.store(at_tile(x, start, column, stride, QUADS, 64, 64, STEPS), tile, mask=last_steps(r, start, stop, STEPS))


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
def load_decays(log_decay, start, column, stop, stride: gl.constexpr, STEPS: gl.constexpr):
    """Log2 decays [64, 64] of rows, 0 for those that are not the first step of a token."""
    r = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, COPY_DECAYS)), 1)
    mask = r < stop - start
    if STEPS > 1:
        mask = mask & ((start + r) % STEPS == 0)
    g = gl.load(at_tile(log_decay, start, column, stride, COPY_DECAYS, 64, 64, STEPS), mask=mask, other=0.0)
    return gl.maximum(g.to(gl.float32) * LOG2E, LEAST)


@gluon.jit
def store_triangles(triangles):
    """Store ones for the tokens of a block of 16 up to a token, and for those after it."""
    same = rows() // 16 == columns() // 16
    triangles.index(0).store((same & (columns() <= rows())).to(gl.bfloat16))
    triangles.index(1).store((same & (columns() > rows())).to(gl.bfloat16))


@gluon.jit
def add_twice(ones, parts, sums, FIRST: gl.constexpr = 0):
    """Start to add the product of ones and a tile that was stored in two parts."""
    sums = warpgroup_mma(ones, parts.index(FIRST + 1), sums, is_async=True)
    return warpgroup_mma(ones, parts.index(FIRST), sums, is_async=True)


@gluon.jit
def store_totals(totals, before, after):
    """Store the sums of the decays of the four blocks of 16 tokens, 64 numbers each."""
    of_block = gl.where(rows() % 16 == 0, before + after, 0.0)
    totals.store(gl.convert_layout(gl.reshape(gl.sum(gl.reshape(of_block, [4, 16, 64]), 1), [256]), OF_TOTALS))


@gluon.jit
def total_of(totals, BLOCK: gl.constexpr):
    """The sum of the decays of a block of 16 tokens [1, 64]."""
    return gl.expand_dims(totals.slice(BLOCK * 64, 64).load(OF_COLUMNS), 0)


@gluon.jit
def number(condition):
    return gl.where(condition, 1.0, 0.0)


@gluon.jit
def from_start(before, totals):
    """Sums of decays from the start of the chunk to each token."""
    block = rows() // 16
    b = before + number(block > 0) * total_of(totals, 0)
    return b + number(block > 1) * total_of(totals, 1) + number(block > 2) * total_of(totals, 2)


@gluon.jit
def to_end(after, totals):
    """Sums of decays from after each token to the end of the chunk."""
    block = rows() // 16
    rest = after + number(block < 3) * total_of(totals, 3)
    return rest + number(block < 2) * total_of(totals, 2) + number(block < 1) * total_of(totals, 1)


@gluon.jit
def to_boundary(before, after, totals, level):
    """Sums of decays between each token and the boundary in its block of this level; none is positive."""
    blocks = gl.reshape(before, [4, 16, 64])
    LAYOUT: gl.constexpr = blocks.type.layout
    place = gl.expand_dims(gl.expand_dims(opaque(gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))), 0), 2)
    half = 32 >> level
    last = (place & -(2 * half)) + (half - 1)  # of the first half of the block; levels 0 and 1 have none inside
    at = gl.gather(blocks, gl.where(blocks <= 0, gl.minimum(last, 15), 0), 1)
    inside = -gl.abs(before - gl.convert_layout(gl.reshape(at, [64, 64]), PAIRS))
    block = rows() // 16
    far = number(level == 0)
    second = before + far * number(block == 3) * total_of(totals, 2)
    first = after + far * number(block == 0) * total_of(totals, 1)
    return gl.where(level < 2, gl.where(is_second(level), second, first), inside)
