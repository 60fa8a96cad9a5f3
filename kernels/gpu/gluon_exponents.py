"""Decays per channel between the tokens of a chunk, by halves (`halves.py`), as exponents of 2: Hopper, eight warps.

With b = n + x the sum of log2 decays from the start of the chunk and n the nearest whole number, a query has the factor
2^x and a key 2^−x, rounded once. A reference point is a whole number and only changes exponents, by 2^(n − r) or
2^(r − n), without rounding. So levels cost integer instructions on numbers of 16 bits, two in a register.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from .gluon_tiles import OF_COLUMNS, OF_ROWS, opaque

SAFE = gl.constexpr(100.0)  # largest exponent, in log2, of a factor around one reference
BLOCK_MARKS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))


@gluon.jit
def allocate_middles(K: gl.constexpr):
    """Allocate memory for 128 + m and 127 − m, for whole numbers m near the sums up to the middle of blocks of 64, 32
    and 16 tokens.
    """
    chunk = gl.allocate_shared_memory(gl.int16, [1, 2, K], BLOCK_MARKS)
    halves = gl.allocate_shared_memory(gl.int16, [2, 2, K], BLOCK_MARKS)
    quarters = gl.allocate_shared_memory(gl.int16, [4, 2, K], BLOCK_MARKS)
    return chunk, halves, quarters


@gluon.jit
def store_middles(marks, b, LEVEL: gl.constexpr):
    BLOCKS: gl.constexpr = 1 << LEVEL
    x = gl.reshape(b, [BLOCKS, 8 // BLOCKS, b.shape[1]])
    LAYOUT: gl.constexpr = x.type.layout
    eighth = gl.arange(0, 8 // BLOCKS, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    middle = gl.expand_dims(gl.expand_dims(eighth, 0), 2) == 4 // BLOCKS - 1
    m = gl.sum(gl.where(middle, x, 0.0), 1)
    marks.store(gl.permute(gl.join(128.0 + m, 127.0 - m).to(gl.int16), (0, 2, 1)))


@gluon.jit
def store_all_middles(middles, b):
    """Store what `allocate_middles` allocates, for the sums b [8,K] up to the end of each block of 8 tokens."""
    for level in gl.static_range(3):
        store_middles(middles[level], gl.floor(b), level)


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
def either(q, k, first):
    """Return q, or k where `first` is −1 rather than 0."""
    asm: gl.constexpr = "lop3.b32 $0, $1, $2, $3, 0xD8;"
    return gl.inline_asm_elementwise(asm, "=r,r,r,r", [q, k, first], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def mark_in_eights(n, first, LEVEL: gl.constexpr):
    """Return the marks of `middles` for blocks of at most 8 tokens, which are in lanes of one warp."""
    if LEVEL == 3:
        asm: gl.constexpr = (
            "{.reg .b32 m; not.b32 m, $2; shfl.sync.idx.b32 $0, $1, 12, 0x031f, 0xffffffff; xor.b32 $0, $0, m; "
            "mov.b32 m, 0x00800080; add.s16x2 $0, $0, m;}"
        )
    elif LEVEL == 4:
        asm: gl.constexpr = (  # type: ignore[no-redef]
            "{.reg .b32 m; not.b32 m, $2; shfl.sync.idx.b32 $0, $1, 4, 0x131f, 0xffffffff; xor.b32 $0, $0, m; "
            "mov.b32 m, 0x00800080; add.s16x2 $0, $0, m;}"
        )
    else:
        asm: gl.constexpr = (  # type: ignore[no-redef]
            "{.reg .b32 m; not.b32 m, $2; shfl.sync.idx.b32 $0, $1, 0, 0x1b1f, 0xffffffff; xor.b32 $0, $0, m; "
            "mov.b32 m, 0x00800080; add.s16x2 $0, $0, m;}"
        )
    return gl.inline_asm_elementwise(asm, "=&r,r,r", [n, first], dtype=gl.int16, is_pure=True, pack=2)


@gluon.jit
def first_halves(LEVEL: gl.constexpr, LAYOUT: gl.constexpr):
    """Return −1 for tokens in the first half of a block of a level and 0 for others, as a column."""
    r = opaque(gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)))
    return gl.expand_dims(((r >> (5 - LEVEL) & 1) - 1).to(gl.int16), 1)


@gluon.jit
def middles(n, first, marks, LEVEL: gl.constexpr, LAYOUT: gl.constexpr):
    """Return 128 + m for tokens of first halves and 127 − m for others, m being n in the middle of a token's block."""
    if LEVEL > 2:
        at = mark_in_eights(n, first, LEVEL)
    else:
        BLOCKS: gl.constexpr = 1 << LEVEL
        K: gl.constexpr = n.shape[1]
        x = gl.reshape(n, [BLOCKS, 2, 32 // BLOCKS, K])
        HALVES: gl.constexpr = x.type.layout
        at = repeated(gl.expand_dims(marks[LEVEL].load(gl.SliceLayout(2, HALVES)), 2), x)
        at = gl.convert_layout(gl.reshape(at, [64, K]), LAYOUT)
    return at


@gluon.jit
def repeated(row, x):
    """Return rows broadcast to the shape of x."""
    return gl.where(x == x, row, row)


@gluon.jit
def around_middle(queries, keys, n, marks, LEVEL: gl.constexpr, LAYOUT: gl.constexpr):
    """Return queries of the second halves of blocks and keys of the first, times the decays between them and the
    boundary, and the exponents of these decays.
    """
    first = first_halves(LEVEL, LAYOUT)
    e = exponent_either(n, middles(n, first, marks, LEVEL, LAYOUT), first)
    return times(either(queries, keys, first), e), e


@gluon.jit
def near_marks(n, marks, FIRST: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the marks of the first or second halves of blocks of 16 tokens for all of their tokens."""
    K: gl.constexpr = n.shape[1]
    x = gl.reshape(n, [4, 16, K])
    BLOCKS: gl.constexpr = x.type.layout
    row = marks[2].slice(0 if FIRST else 1, 1, 1)
    return gl.convert_layout(gl.reshape(repeated(row.load(BLOCKS), x), [64, K]), LAYOUT)


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
