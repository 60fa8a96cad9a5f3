"""Decays per channel between the tokens of a chunk, by halves (`halves.py`), in Gluon: Hopper, eight warps, bf16.

With b = n + x the sum of log2 decays from the start of the chunk and n the nearest whole number, a query has the factor
2^x and a key 2^−x, rounded once. A reference point is a whole number and only changes exponents, by 2^(n − r) or
2^(r − n), without rounding. So levels cost integer instructions on numbers of 16 bits, two in a register, and no choice
of a reference point changes a bit.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from .gluon_tiles import NARROW_COPY, OF_COLUMNS, OF_ROWS, async_load, at_tile, last_steps, opaque

LOG2E = gl.constexpr(1.4426950408889634)
LEAST = gl.constexpr(-152.0)  # as in `tiles.py`
SAFE = gl.constexpr(100.0)  # largest exponent, in log2, of a factor around one reference
OCTETS = gl.constexpr(gl.BlockedLayout([8, 2], [1, 32], [8, 1], [1, 0]))  # a warp has 8 tokens, a thread 2 channels
WIDE_COPY = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [8, 1], [1, 0]))  # 16 bytes a thread, rows of 64 in fp32
LINES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def rows():
    """Numbers of the rows of a tile [64, 64] in the layout `PAIRS`, as a column."""
    return gl.expand_dims(opaque(gl.arange(0, 64, OF_ROWS)), 1)


@gluon.jit
def columns():
    """Numbers of the columns of a tile in the layout `PAIRS`, as a row."""
    return gl.expand_dims(opaque(gl.arange(0, 64, OF_COLUMNS)), 0)


@gluon.jit
def copy_rows(shared, x, start, column, stop, stride: gl.constexpr, STEPS: gl.constexpr = 1):
    """Start to copy a tile [64, 64] of rows from `start` on, as `copy_tokens` does for 128 channels."""
    r = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, NARROW_COPY)), 1)
    async_load(
        shared, at_tile(x, start, column, stride, NARROW_COPY, 64, 64, STEPS), mask=last_steps(r, start, stop, STEPS)
    )


@gluon.jit
def copy_square(shared, x, row, column, stride: gl.constexpr):
    """Start to copy a whole tile [64, 64]."""
    async_load(shared, at_tile(x, row, column, stride, NARROW_COPY, 64, 64))


@gluon.jit
def store_rows(x, start, column, stop, stride: gl.constexpr, value, STEPS: gl.constexpr = 1):
    """Store a tile [64, 64] in bf16; of `STEPS` rows per token, only the last."""
    tile = gl.convert_layout(value.to(gl.bfloat16), OCTETS)
    r = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, OCTETS)), 1)
    gl.store(at_tile(x, start, column, stride, OCTETS, 64, 64, STEPS), tile, mask=last_steps(r, start, stop, STEPS))


@gluon.jit
def exp2(x):
    """2^x, 0 below 2^−126."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def in_log2(g):
    return gl.maximum(g.to(gl.float32) * LOG2E, LEAST)


@gluon.jit
def first_steps(r, start, stop, STEPS: gl.constexpr):
    """Return which rows r from `start` on are the first of the `STEPS` rows of a token, and before `stop`."""
    valid = r < stop - start
    if STEPS > 1:
        valid = valid & ((start + r) % STEPS == 0)
    return valid


@gluon.jit
def copy_decays(shared, x, start, column, stop, stride: gl.constexpr, STEPS: gl.constexpr = 1):
    """Start to copy log decays [64, 64] in fp32 or bf16; 0 for rows that are not the first step of a token."""
    LAYOUT: gl.constexpr = NARROW_COPY if x.dtype.element_ty == gl.bfloat16 else WIDE_COPY
    r = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)), 1)
    at = at_tile(x, start, column, stride, LAYOUT, 64, 64, STEPS)
    async_load(shared, at, mask=first_steps(r, start, stop, STEPS))


@gluon.jit
def load_log_decays(log_decay, start, column, stop, stride: gl.constexpr, STEPS: gl.constexpr):
    """Load what `copy_decays` copies, in log2."""
    r = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, OCTETS)), 1)
    at = at_tile(log_decay, start, column, stride, OCTETS, 64, 64, STEPS)
    return in_log2(gl.load(at, mask=first_steps(r, start, stop, STEPS), other=0.0))


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
def in_blocks(x, ROWS: gl.constexpr):
    return gl.reshape(x, [64 // ROWS, ROWS, 64])


@gluon.jit
def allocate_middles(K: gl.constexpr):
    """Allocate memory for whole numbers near the sums up to the middle of blocks of 64, 32 and 16 tokens.

    Each level has a row of them for each block of 16 tokens.
    """
    return gl.allocate_shared_memory(gl.int16, [3, 4, K], LINES)


@gluon.jit
def store_middles(middles, b, LAYOUT: gl.constexpr):
    """Store what `allocate_middles` allocates.

    Args:
        middles: That memory.
        b: Sums of decays up to the end of each block of 8 tokens [8,K].
        LAYOUT: Layout of [8,4,K] in which b is broadcast without exchanges.
    """
    n = gl.expand_dims(gl.convert_layout(whole_and_rest(b)[0], gl.SliceLayout(1, LAYOUT)), 1).to(gl.int32)
    eighth = gl.expand_dims(gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))), 1), 2)
    quarter = gl.expand_dims(gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))), 0), 2)
    for level in gl.static_range(3):
        middle = (quarter * 2 >> (3 - level) << (3 - level)) + ((4 >> level) - 1)
        middles.index(level).store(gl.sum(gl.where(eighth == middle, n, 0), 0).to(gl.int16))


@gluon.jit
def plus(x, y):
    return x + y


@gluon.jit
def whole_and_rest(b):
    """Return the nearest whole number in 16 bits, and the rest in fp32."""
    asm: gl.constexpr = (
        "{.reg .b32 x, y; add.rn.f32 x, $3, 0f4B400000; add.rn.f32 y, $4, 0f4B400000; prmt.b32 $0, x, y, 0x5410; "
        "sub.rn.f32 x, x, 0f4B400000; sub.rn.f32 y, y, 0f4B400000; sub.rn.f32 $1, $3, x; sub.rn.f32 $2, $4, y;}"
    )
    return gl.inline_asm_elementwise(asm, "=&r,=&r,=&r,r,r", [b], dtype=(gl.int16, gl.float32), is_pure=True, pack=2)


@gluon.jit
def exponent_after(n, mark):
    """Return n − r + 127 for mark = 127 − r, or 0 if it is negative."""
    asm: gl.constexpr = "{.reg .b32 z; mov.b32 z, 0; add.s16x2 $0, $1, $2; max.s16x2 $0, $0, z;}"
    return gl.inline_asm_elementwise(asm, "=r,r,r", [n, mark], dtype=gl.int16, is_pure=True, pack=2)


@gluon.jit
def exponent_before(n, mark):
    """Return r − n + 127 for mark = 128 + r, or 0 if it is negative."""
    asm: gl.constexpr = "{.reg .b32 e, z; mov.b32 z, 0; not.b32 e, $1; add.s16x2 $0, e, $2; max.s16x2 $0, $0, z;}"
    return gl.inline_asm_elementwise(asm, "=r,r,r", [n, mark], dtype=gl.int16, is_pure=True, pack=2)


@gluon.jit
def exponent_either(n, mark, first):
    """Return `exponent_after`, or where `first` is −1 rather than 0, `exponent_before`."""
    asm: gl.constexpr = "{.reg .b32 e, z; mov.b32 z, 0; xor.b32 e, $1, $3; add.s16x2 $0, e, $2; max.s16x2 $0, $0, z;}"
    return gl.inline_asm_elementwise(asm, "=r,r,r,r", [n, mark, first], dtype=gl.int16, is_pure=True, pack=2)


@gluon.jit
def times(x, e):
    """Return 2^(e − 127) x in bf16, exactly unless it is too small, and 0 for e = 0."""
    asm: gl.constexpr = "{.reg .b32 y; shl.b32 y, $2, 7; mul.rn.bf16x2 $0, $1, y;}"
    return gl.inline_asm_elementwise(asm, "=r,r,r", [x, e], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def power(e):
    """Return 2^(e − 127) in fp32, and 0 for e = 0."""
    asm: gl.constexpr = "{.reg .b32 y; and.b32 y, $2, 0xffff0000; shl.b32 $0, $2, 23; shl.b32 $1, y, 7;}"
    return gl.inline_asm_elementwise(asm, "=&r,=r,r", [e], dtype=gl.float32, is_pure=True, pack=2)


@gluon.jit
def reciprocal(x):
    asm: gl.constexpr = "rcp.approx.ftz.f32 $0, $1;"
    return gl.inline_asm_elementwise(asm, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def either(q, k, first):
    """Return q, or k where `first` is −1 rather than 0."""
    asm: gl.constexpr = "lop3.b32 $0, $1, $2, $3, 0xD8;"
    return gl.inline_asm_elementwise(asm, "=r,r,r,r", [q, k, first], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def mark_of(m, first):
    """Return 127 − m for `exponent_either`, or where `first` is −1 rather than 0, 128 + m."""
    asm: gl.constexpr = "{.reg .b32 z; not.b32 z, $2; xor.b32 $0, $1, z; mov.b32 z, 0x00800080; add.s16x2 $0, $0, z;}"
    return gl.inline_asm_elementwise(asm, "=&r,r,r", [m, first], dtype=gl.int16, is_pure=True, pack=2)


@gluon.jit
def middle_inside(n, level):
    """Return n in the middle of each token's block of a level from 3 on, whose tokens are in lanes of one warp."""
    LAYOUT: gl.constexpr = n.type.layout
    zero = gl.zeros(n.shape, gl.int16, LAYOUT)
    lane = zero + gl.where(level == 3, 12, gl.where(level == 4, 4, 0)).to(gl.int16)
    kept = zero + gl.where(level == 3, 0x031F, gl.where(level == 4, 0x131F, 0x1B1F)).to(gl.int16)
    asm: gl.constexpr = "shfl.sync.idx.b32 $0, $1, $2, $3, 0xffffffff;"
    return gl.inline_asm_elementwise(asm, "=r,r,r,r", [n, lane, kept], dtype=gl.int16, is_pure=True, pack=2)


@gluon.jit
def first_halves(level, LAYOUT: gl.constexpr):
    """Return −1 for tokens in the first half of a block of a level and 0 for others, as a column."""
    r = opaque(gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)))
    return gl.expand_dims(((r >> (5 - level) & 1) - 1).to(gl.int16), 1)


@gluon.jit
def middle_across(n, middles, level):
    """Return whole numbers near the sums up to the middle of each token's block of a level up to 2."""
    LAYOUT: gl.constexpr = n.type.layout
    x = gl.reshape(n, [4, 16, n.shape[1]])
    row = middles.index(level).load(gl.SliceLayout(1, x.type.layout))
    return gl.convert_layout(gl.reshape(repeated(gl.expand_dims(row, 1), x), n.shape), LAYOUT)


@gluon.jit
def repeated(row, x):
    """Return rows broadcast to the shape of x."""
    return gl.where(x == x, row, row)


@gluon.jit
def around_middle(queries, keys, n, middle, level):
    """Return queries of the second halves of blocks and keys of the first, times the decays between them and the
    boundary, and the exponents of these decays.
    """
    LAYOUT: gl.constexpr = n.type.layout
    first = first_halves(level, LAYOUT)
    e = exponent_either(n, mark_of(middle, first), first)
    return times(either(queries, keys, first), e), e


@gluon.jit
def near_middle(queries, keys, n, middle):
    """Return queries and keys times the decays between them and the middle of their block, and the exponents."""
    LAYOUT: gl.constexpr = n.type.layout
    zero = gl.zeros(n.shape, gl.int16, LAYOUT)
    after, before = exponent_after(n, mark_of(middle, zero)), exponent_before(n, mark_of(middle, zero - 1))
    return times(queries, after), times(keys, before), after, before


@gluon.jit
def apart():
    """Return the exclusive or of the numbers of both tokens of each pair.

    It is at least n and below 2n, for a power of two n, if the tokens are in different halves of a block of 2n.
    """
    return gl.expand_dims(opaque(gl.arange(0, 64, OF_ROWS)), 1) ^ gl.expand_dims(gl.arange(0, 64, OF_COLUMNS), 0)


@gluon.jit
def square(tile, zeros):
    """Start to multiply a tile with its transpose."""
    return warpgroup_mma(tile, tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
