"""Scores of steep chunks by halves, and their gradients, on Hopper (`hopper_vector_decay.py`).

Exponents are numbers of 16 bits, two in a register: few integer instructions change those of two factors.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ...gpu.gluon_tiles import OF_COLUMNS, OF_ROWS, PAIRS, barrier, distance, opaque
from .hopper_vector_sums import at_end, at_start


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


@gluon.jit
def scores_by_halves(queries, keys, n, points, marks, steep, one, other, queries_s, keys_s, LAYOUT: gl.constexpr):
    """Return the scores of a steep chunk; those of pairs whose key is later are arbitrary.

    If `steep` is 1, the scores in blocks of 16 tokens are still to be computed, as the product of `one` and `other`.
    Queries and keys for the state are stored in `queries_s` and `keys_s`, while products run.
    """
    pairs = gl.zeros([64, 64], gl.float32, PAIRS)
    barrier()
    one.store(around_middle(queries, keys, n, marks, 0, LAYOUT)[0])
    other.store(around_middle(queries, keys, n, marks, 1, LAYOUT)[0])
    fence_async_shared()
    barrier()
    A, A1 = square(one, pairs), square(other, pairs)
    queries_s.store(times(queries, exponent_after(n, at_start(points, LAYOUT))))
    keys_s.store(times(keys, exponent_before(n, at_end(points, LAYOUT))))
    A, A1 = warpgroup_mma_wait(0, deps=[A, A1])
    A = gl.where(apart() >= 32, A, A1)
    barrier()
    if steep == 1:
        one.store(times(queries, exponent_after(n, near_marks(n, marks, False, LAYOUT))))
        other.store(times(keys, exponent_before(n, near_marks(n, marks, True, LAYOUT))))
    else:
        for pair in gl.static_range(2):
            one.store(around_middle(queries, keys, n, marks, 2 * pair + 2, LAYOUT)[0])
            other.store(around_middle(queries, keys, n, marks, 2 * pair + 3, LAYOUT)[0])
            fence_async_shared()
            barrier()
            A1, A2 = square(one, pairs), square(other, pairs)
            A1, A2 = warpgroup_mma_wait(0, deps=[A1, A2])
            A = gl.where(apart() >= (16 >> 2 * pair), A, gl.where(apart() >= (8 >> 2 * pair), A1, A2))
            barrier()
        one.store(queries)
        other.store(keys)
        fence_async_shared()
        barrier()
        itself = warpgroup_mma(one, other.permute((1, 0)), pairs, use_acc=False, is_async=True)
        A = gl.where(apart() == 0, warpgroup_mma_wait(0, deps=[itself]), A)
    return A


@gluon.jit
def at_level(D, LEVEL: gl.constexpr):
    """Return D with zeros for pairs that another level separates."""
    return gl.where(apart() >> (5 - LEVEL) == 1, D, gl.zeros([64, 64], gl.bfloat16, PAIRS))


@gluon.jit
def gradients_of_level(
    read_s, written_s, exponents_s, marks, pairs_s, change_s, scores_s, tile_s, LEVEL: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Return the part of a level's pairs in the gradients of queries and keys, and put their scores into `scores_s`."""
    n = exponents_s.load(LAYOUT)
    tile, e = around_middle(read_s.load(LAYOUT), written_s.load(LAYOUT), n, marks, LEVEL, LAYOUT)
    tile_s.store(tile)
    change_s.store(at_level(pairs_s.load(PAIRS), LEVEL))
    fence_async_shared()
    barrier()
    A = square(tile_s, gl.zeros([64, 64], gl.float32, PAIRS))
    channels = gl.zeros([64, n.shape[1]], gl.float32, LAYOUT)
    change = warpgroup_mma(change_s, tile_s, channels, use_acc=False, is_async=True)
    A = warpgroup_mma_wait(1, deps=[A]).to(gl.bfloat16)
    if LEVEL > 0:
        A = gl.where(apart() >> (5 - LEVEL) == 1, A, scores_s.load(PAIRS))
    scores_s.store(A)
    change = warpgroup_mma_wait(0, deps=[change])
    barrier()
    change *= power(e)
    second = first_halves(LEVEL, LAYOUT) == 0
    return gl.where(second, change, 0.0), gl.where(second, 0.0, change)


@gluon.jit
def gradients_by_halves(
    read_s, written_s, values_s, grad_s, before_s, exponents_s, points, marks, steep, enter_s, leave_s, pairs_s,
    scores_s, lower_s, D, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Return the gradients of queries, and of keys without those through the state, of a steep chunk; D = dO Vᵀ.

    They are gradients of the queries and keys in `read_s` and `written_s`, without pairs of a token with itself. Scores
    are stored in `scores_s`, queries and keys for the state in `enter_s` and `leave_s`. Meanwhile the memory of the
    triangle has the scores, since registers are short here.
    """
    zeros, none = gl.zeros([64, 64], gl.float32, PAIRS), gl.zeros([64, 64], gl.bfloat16, PAIRS)
    swapped = warpgroup_mma(values_s, grad_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
    D = gl.where(distance() > 0, D, warpgroup_mma_wait(0, deps=[swapped]))
    barrier()
    pairs_s.store(D.to(gl.bfloat16))
    inside = read_s, written_s, exponents_s, marks, pairs_s, scores_s, lower_s
    dQ, dK = gradients_of_level(*inside, enter_s, 0, LAYOUT)
    to_q, to_k = gradients_of_level(*inside, leave_s, 1, LAYOUT)
    dQ += to_q
    dK += to_k
    if steep == 1:
        n = exponents_s.load(LAYOUT)
        channels = gl.zeros([64, n.shape[1]], gl.float32, LAYOUT)
        of_queries = exponent_after(n, near_marks(n, marks, False, LAYOUT))
        of_keys = exponent_before(n, near_marks(n, marks, True, LAYOUT))
        enter_s.store(times(read_s.load(LAYOUT), of_queries))
        leave_s.store(times(written_s.load(LAYOUT), of_keys))
        scores_s.store(gl.where((distance() > 0) & (apart() < 16), pairs_s.load(PAIRS), none))
        fence_async_shared()
        barrier()
        near = warpgroup_mma(enter_s, leave_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
        change = warpgroup_mma(scores_s, leave_s, channels, use_acc=False, is_async=True)
        near = warpgroup_mma_wait(1, deps=[near]).to(gl.bfloat16)
        lower_s.store(gl.where(apart() < 16, near, lower_s.load(PAIRS)))
        change = warpgroup_mma_wait(0, deps=[change])
        barrier()
        dQ += power(of_queries) * change
        change = warpgroup_mma(scores_s.permute((1, 0)), enter_s, channels, use_acc=False, is_async=True)
        change = warpgroup_mma_wait(0, deps=[change])
        barrier()
        dK += power(of_keys) * change
    else:
        for level in gl.static_range(2, 6):
            to_q, to_k = gradients_of_level(*inside, enter_s if level % 2 == 0 else leave_s, level, LAYOUT)
            dQ += to_q
            dK += to_k
        itself = warpgroup_mma(read_s, written_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
        itself = warpgroup_mma_wait(0, deps=[itself]).to(gl.bfloat16)
        lower_s.store(gl.where(apart() == 0, itself, lower_s.load(PAIRS)))
    n = exponents_s.load(LAYOUT)
    channels = gl.zeros([64, n.shape[1]], gl.float32, LAYOUT)
    through = warpgroup_mma(grad_s, before_s.permute((1, 0)), channels, use_acc=False, is_async=True)
    scores_s.store(gl.where(distance() >= 0, lower_s.load(PAIRS), none))
    lower_triangle(lower_s)
    e = exponent_after(n, at_start(points, LAYOUT))
    enter_s.store(times(read_s.load(LAYOUT), e))
    leave_s.store(times(written_s.load(LAYOUT), exponent_before(n, at_end(points, LAYOUT))))
    through = warpgroup_mma_wait(0, deps=[through])
    barrier()
    return dQ + power(e) * through, dK


@gluon.jit
def lower_triangle(shared):
    """Store ones on and below the diagonal."""
    shared.store((distance() >= 0).to(gl.bfloat16))
