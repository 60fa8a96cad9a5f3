"""Decays per key channel in one pass over the chunks of a sequence, on Hopper: outputs, states, or all gradients.

With b the log decays of a chunk summed from its start, and per channel two reference points r and s:

    Q' = Q e^{b − r}     K' = K e^{s − b}     S' = e^r S     dS' = e^{b_C − s} dS

    forward    O = Q' S' + lower(Q' K'ᵀ) V          S ← e^{b_C − s} (e^{s − r} S' + K'ᵀ V)
    backward   D = lower(dO Vᵀ)                     dV = lower(Q' K'ᵀ)ᵀ dO + K' dS'
               dQ = e^{b − r} ⊙ (dO S'ᵀ + D K')     dK = e^{s − b} ⊙ (V dS'ᵀ + Dᵀ Q')
               dS ← e^r (e^{s − r} dS' + Q'ᵀ dO)

Both reference points are b in the middle of the chunk, so that Q' K'ᵀ has the decays between its tokens. Where a decay
from there to an end of the chunk is too strong for the exponent of a factor (a steep channel), r is 0 and s is b_C:
what passes through the state is right. The scores of such a chunk, and their gradients, come by halves
(`gpu/halves.py`): pairs in different halves of the chunk or of blocks of 32 tokens with the reference between the
halves, pairs in a block of 16 tokens with one in its middle, or by halves too where that does not suffice.

All references are whole numbers in log2. With b = n + x for the nearest whole number n, factors 2^x are rounded once,
in Q 2^x and K 2^−x, and a reference only changes exponents: 2^(n − r) and 2^(s − n). So no choice changes a bit of a
row, although it depends on later tokens. Exponents are numbers of 16 bits, two in a register.

A program has a whole state [K,128], K = 64 or 128, in the registers of eight warps. Sums of decays from the start of a
chunk are products with the lower triangle of ones: of decays in bf16 as they are, of those in fp32 in two parts of 8
bits. The states S' before all chunks, which the gradients need, are stored with the outputs or computed again. In the
gradient pass, the loads of a chunk are issued as soon as the chunk before has read a buffer for the last time.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ...gpu.gluon_halves import store_parts
from ...gpu.gluon_tiles import (
    COPY,
    FLAT,
    NARROW_COPY,
    NARROW_OCTETS,
    OCTETS,
    OF_COLUMNS,
    OF_ROWS,
    PAIRS,
    ROWS,
    SHARED,
    STATE,
    async_load,
    at_tile,
    barrier,
    copy_state,
    copy_tokens,
    distance,
    in_states,
    key_head_of,
    opaque,
    reinterpret,
    segment_of,
    store_rows,
)

LOG2E = gl.constexpr(1.4426950408889634)
LEAST = gl.constexpr(-152.0)  # as in `tiles.py`
LEAST_NARROW = gl.constexpr(-106.0)  # the same for decays in bf16, which stay natural logarithms until they are summed
SAFE = gl.constexpr(100.0)  # largest exponent, in log2, of a factor around one reference
COPY_DECAYS = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [8, 1], [1, 0]))
COPY_FEW_DECAYS = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [8, 1], [1, 0]))  # of 64 channels
COLUMNS = gl.constexpr(gl.BlockedLayout([32, 1], [1, 32], [2, 4], [0, 1]))  # half a column a thread
DECAYS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
LINES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
BLOCK_MARKS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
LINE = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [8, 1], [1, 0]))
EIGHTS = gl.constexpr(gl.BlockedLayout([8, 1], [1, 32], [1, 8], [1, 0]))  # 8 numbers of a channel a thread
EACH_WARP = gl.constexpr(gl.BlockedLayout([4], [32], [8], [0]))  # 128 numbers in every warp


@gluon.jit
def as_narrow(decays, K: gl.constexpr):
    """The first half of memory for a tile in fp32, for one in bf16."""
    return reinterpret(decays, gl.bfloat16, [64, K], SHARED)


@gluon.jit
def copy_keys(shared, x, token, column, stop, stride: gl.constexpr, K: gl.constexpr):
    """Start to copy a tile [64, K] in bf16; zeros from token `stop` on."""
    LAYOUT: gl.constexpr = COPY if K == 128 else NARROW_COPY
    copy_tokens(shared, x, token, column, stop, stride, LAYOUT=LAYOUT, C=K)


@gluon.jit
def copy_decays(shared, x, token, column, stop, stride: gl.constexpr, K: gl.constexpr):
    """Start to copy a tile [64, K] in fp32 or bf16; zeros from token `stop` on."""
    if x.dtype.element_ty == gl.bfloat16:
        copy_keys(as_narrow(shared, K), x, token, column, stop, stride, K)
    else:
        LAYOUT: gl.constexpr = COPY_DECAYS if K == 128 else COPY_FEW_DECAYS
        r = gl.expand_dims(opaque(gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))), 1)
        at = at_tile(x, token, column, stride, LAYOUT, 64, K)
        async_load(shared, at, mask=r < stop - token)


@gluon.jit
def copy_ends(shared, x, place, wanted, K: gl.constexpr):
    """Start to copy the sums of the eight blocks of a chunk, 8K numbers."""
    row, channel = gl.arange(0, 8, gl.SliceLayout(1, LINE)), gl.arange(0, K, gl.SliceLayout(0, LINE))
    at = gl.expand_dims(row * K, 1) + gl.expand_dims(channel, 0)
    async_load(shared, x + (place * (8 * K) + at), mask=(at >= 0) & wanted)


@gluon.jit
def in_log2(g):
    return gl.maximum(g * LOG2E, LEAST)


@gluon.jit
def bounded(decays, NARROW: gl.constexpr, K: gl.constexpr):
    """Decays as `split` stores them: bounded, and in log2 if they are in fp32."""
    KEYS: gl.constexpr = ROWS if K == 128 else PAIRS
    if NARROW:
        g = gl.maximum(as_narrow(decays, K).load(KEYS).to(gl.float32), LEAST_NARROW)
    else:
        g = in_log2(decays.load(KEYS))
    return g


@gluon.jit
def split(decays, g, NARROW: gl.constexpr, K: gl.constexpr):
    """Store g as the sum of two tiles in bf16, or as one, for `from_start`."""
    if NARROW:
        as_narrow(decays, K).store(g.to(gl.bfloat16))
    else:
        store_parts(reinterpret(decays, gl.bfloat16, [2, 64, K], SHARED), g)


@gluon.jit
def from_start(lower, decays, zeros, NARROW: gl.constexpr, K: gl.constexpr):
    """Start to compute the sums of decays from the start of a chunk."""
    if NARROW:
        b = warpgroup_mma(lower, as_narrow(decays, K), zeros, use_acc=False, is_async=True)
    else:
        parts = reinterpret(decays, gl.bfloat16, [2, 64, K], SHARED)
        b = warpgroup_mma(lower, parts.index(0), zeros, use_acc=False, is_async=True)
        b = warpgroup_mma(lower, parts.index(1), b, is_async=True)
    return b


@gluon.jit
def waited(b, NARROW: gl.constexpr):
    """The sums that were started, in log2."""
    b = warpgroup_mma_wait(0, deps=[b])
    if NARROW:
        b *= LOG2E
    return b


@gluon.jit
def plus(x, y):
    return x + y


@gluon.jit
def allocate_points(K: gl.constexpr):
    """Allocate memory for the reference points of a chunk, separately to avoid barriers between stores.

    Returns:
        In log2, r, s − r, the sum of all decays − s, and how steep each channel is: 0 if r = s holds all factors, 2 if
        even halves of blocks of 16 tokens are too steep for a single reference, 1 otherwise. What is added to
        exponents: 127 − r and 128 + s.
    """
    enter = gl.allocate_shared_memory(gl.float32, [K], FLAT)
    within = gl.allocate_shared_memory(gl.float32, [K], FLAT)
    leave = gl.allocate_shared_memory(gl.float32, [K], FLAT)
    steep = gl.allocate_shared_memory(gl.float32, [K], FLAT)
    entering = gl.allocate_shared_memory(gl.int16, [K], FLAT)
    leaving = gl.allocate_shared_memory(gl.int16, [K], FLAT)
    return enter, within, leave, steep, entering, leaving


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
def store_points(points, middles, ends):
    """Store the reference points of a chunk, for the sums of the decays of its blocks of 8 tokens [8, K]."""
    g = ends.load(EIGHTS)
    b = gl.associative_scan(g, 0, plus)
    block = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(1, EIGHTS)), 1)
    early, total = gl.sum(gl.where(block == 3, b, 0.0), 0), gl.sum(gl.where(block == 7, b, 0.0), 0)
    steep = gl.maximum(-early, early - total) > SAFE
    enter = gl.where(steep, 0.0, gl.floor(early))
    leave = gl.where(steep, gl.floor(total), enter)
    points[0].store(enter)
    points[1].store(leave - enter)
    points[2].store(total - leave)
    points[3].store(steep.to(gl.float32) + (gl.min(g, 0) < -SAFE).to(gl.float32))
    points[4].store((127.0 - enter).to(gl.int16))
    points[5].store((128.0 + leave).to(gl.int16))
    if middles is not None:
        for level in gl.static_range(3):
            store_middles(middles[level], gl.floor(b), level)


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
def of_state(points, OF_STATE: gl.constexpr):
    """The exponents of three factors of a state: before it enters the products of a chunk, in them, and afterwards."""
    return points[0].load(OF_STATE), points[1].load(OF_STATE), points[2].load(OF_STATE)


@gluon.jit
def steepness(points):
    """Return how steep the steepest channel of a chunk is."""
    return gl.max(points[3].load(EACH_WARP).to(gl.int32), 0)


@gluon.jit
def at_start(points, LAYOUT: gl.constexpr):
    """Return 127 − r as a row."""
    return gl.expand_dims(points[4].load(gl.SliceLayout(0, LAYOUT)), 0)


@gluon.jit
def at_end(points, LAYOUT: gl.constexpr):
    """Return 128 + s as a row."""
    return gl.expand_dims(points[5].load(gl.SliceLayout(0, LAYOUT)), 0)


@gluon.jit
def sums_of_blocks(shared, decays, out, NARROW: gl.constexpr, K: gl.constexpr):
    """Sum the decays of a chunk over blocks of 8 tokens, into shared memory and, if wanted, to `out`."""
    if NARROW:
        g = gl.maximum(as_narrow(decays, K).load(COLUMNS).to(gl.float32), LEAST_NARROW) * LOG2E
    else:
        g = in_log2(decays.load(COLUMNS))
    blocks = gl.sum(gl.reshape(g, [8, 8, K]), 1)
    OUT: gl.constexpr = blocks.type.layout
    if out is not None:
        block = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(1, OUT)) * K, 1)
        gl.store(out + (block + gl.expand_dims(gl.arange(0, K, gl.SliceLayout(0, OUT)), 0)), blocks)
    shared.store(blocks)


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


@gluon.jit(do_not_specialize=["chunks", "groups"])
def outputs(
    q,
    k,
    v,
    log_decay,
    out,
    into,
    ends,
    first,
    last,
    segments,
    scale,
    q_head,
    k_head,
    v_head,
    chunks,
    groups,
    q_token: gl.constexpr,
    k_token: gl.constexpr,
    v_token: gl.constexpr,
    heads: gl.constexpr,
    SUBHEADS: gl.constexpr,
    K: gl.constexpr,
):
    NARROW: gl.constexpr = log_decay.dtype.element_ty == gl.bfloat16
    KEYS: gl.constexpr = ROWS if K == 128 else PAIRS  # layout of a tile [64, K]
    STATES: gl.constexpr = STATE if K == 128 else ROWS
    OF_STATE: gl.constexpr = gl.SliceLayout(1, STATES)
    n, start, stop, first_chunk, state = segment_of(segments, heads)
    place = n.to(gl.int64) * chunks + first_chunk
    value_head = n // SUBHEADS
    key_head = key_head_of(n, groups, SUBHEADS)
    q += key_head.to(gl.int64) * q_head
    k += key_head.to(gl.int64) * k_head
    v += value_head.to(gl.int64) * v_head
    count = gl.cdiv(stop - start, 64)

    queries_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, K], SHARED)
    keys_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, K], SHARED)
    decays_s = gl.allocate_shared_memory(gl.float32, [2, 64, K], DECAYS)
    values_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 128], SHARED)
    state_s = gl.allocate_shared_memory(gl.bfloat16, [K, 128], SHARED)
    lower_s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    scores_s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    ends_s = gl.allocate_shared_memory(gl.float32, [8, K], LINES)
    points, middles_s = allocate_points(K), allocate_middles(K)

    offsets = in_states(state, n, heads, STATES, K)
    S = gl.zeros([K, 128], gl.float32, STATES)
    if first is not None:
        S = gl.load(first + offsets)
    lower_triangle(lower_s)
    rows, pairs = gl.zeros([64, 128], gl.float32, ROWS), gl.zeros([64, 64], gl.float32, PAIRS)
    channels = rows if K == 128 else gl.zeros([64, K], gl.float32, KEYS)
    lower = gl.expand_dims(gl.arange(0, 64, OF_ROWS), 1) >= gl.expand_dims(gl.arange(0, 64, OF_COLUMNS), 0)
    if count > 0:
        copy_decays(decays_s.index(0), log_decay, start, n * K, stop, heads * K, K)
        copy_keys(queries_s.index(0), q, start, 0, stop, q_token, K)
        copy_keys(keys_s.index(0), k, start, 0, stop, k_token, K)
        copy_tokens(values_s.index(0), v, start, 0, stop, v_token)
    async_copy.commit_group()
    for i in range(count):
        token = start + i * 64
        stage, following = i % 2, (i + 1) % 2
        queries, keys, values = queries_s.index(stage), keys_s.index(stage), values_s.index(stage)
        decays = decays_s.index(stage)
        async_copy.wait_group(0)
        barrier()
        if i + 1 < count:
            copy_decays(decays_s.index(following), log_decay, token + 64, n * K, stop, heads * K, K)
            copy_keys(queries_s.index(following), q, token + 64, 0, stop, q_token, K)
            copy_keys(keys_s.index(following), k, token + 64, 0, stop, k_token, K)
            copy_tokens(values_s.index(following), v, token + 64, 0, stop, v_token)
        async_copy.commit_group()
        sums_of_blocks(ends_s, decays, None if into is None else ends + (place + i) * (8 * K), NARROW, K)
        g = bounded(decays, NARROW, K)
        barrier()
        store_points(points, middles_s, ends_s)
        split(decays, g, NARROW, K)
        fence_async_shared()
        barrier()
        b = from_start(lower_s, decays, channels, NARROW, K)
        entering, within, leaving = of_state(points, OF_STATE)
        S *= gl.expand_dims(gl.exp2(entering), 1)
        state_s.store(S.to(gl.bfloat16))
        S *= gl.expand_dims(gl.exp2(within), 1)
        rest = gl.exp2(leaving)
        b = waited(b, NARROW)
        exponents, reach = whole_and_rest(b)
        read = (queries.load(KEYS).to(gl.float32) * (gl.exp2(reach) * scale)).to(gl.bfloat16)
        written = (keys.load(KEYS).to(gl.float32) * gl.exp2(-reach)).to(gl.bfloat16)
        steep = steepness(points)
        near, earlier, by_halves = queries, keys, pairs
        if steep != 0:
            here = opaque(stage)  # addresses are computed again, rather than kept for the products of all chunks
            tiles = reinterpret(decays_s.index(here), gl.bfloat16, [2, 64, K], SHARED)
            near, earlier = tiles.index(0), tiles.index(1)
            shared = near, earlier, queries_s.index(here), keys_s.index(here)
            by_halves = scores_by_halves(read, written, exponents, points, middles_s, steep, *shared, KEYS)
        else:
            queries.store(times(read, exponent_after(exponents, at_start(points, KEYS))))
            keys.store(times(written, exponent_before(exponents, at_end(points, KEYS))))
        fence_async_shared()
        barrier()
        A = warpgroup_mma(near, earlier.permute((1, 0)), pairs, use_acc=False, is_async=True)
        O = warpgroup_mma(queries, state_s, rows, use_acc=False, is_async=True)
        S = warpgroup_mma(keys.permute((1, 0)), values, S, is_async=True)
        A = warpgroup_mma_wait(2, deps=[A])
        A = gl.where(apart() < gl.where(steep == 0, 64, gl.where(steep == 1, 16, 0)), A, by_halves)
        scores_s.store(gl.where(lower, A, 0.0).to(gl.bfloat16))
        fence_async_shared()
        barrier()
        O = warpgroup_mma(scores_s, values, O, is_async=True)
        if into is not None:
            at = at_tile(into, ((first_chunk + i).to(gl.int64) * heads + n) * K, 0, 128, COPY, K, 128)
            gl.store(at, state_s.load(COPY))
        S = warpgroup_mma_wait(1, deps=[S])
        S *= gl.expand_dims(rest, 1)
        O = warpgroup_mma_wait(0, deps=[O])
        store_rows(out, token, n * 128, stop, heads * 128, O)
    if last is not None:
        gl.store(last + offsets, S)


@gluon.jit(do_not_specialize=["chunks", "groups"])
def states(
    x,
    y,
    log_decay,
    into,
    ends,
    first,
    last,
    shrunk,
    segments,
    scale,
    x_head,
    y_head,
    chunks,
    groups,
    x_token: gl.constexpr,
    y_token: gl.constexpr,
    heads: gl.constexpr,
    SUBHEADS: gl.constexpr,
    K: gl.constexpr,
    REVERSE: gl.constexpr,
):
    NARROW: gl.constexpr = log_decay.dtype.element_ty == gl.bfloat16
    KEYS: gl.constexpr = ROWS if K == 128 else PAIRS  # layout of a tile [64, K]
    STATES: gl.constexpr = STATE if K == 128 else ROWS
    OF_STATE: gl.constexpr = gl.SliceLayout(1, STATES)
    n, start, stop, first_chunk, state = segment_of(segments, heads)
    place = n.to(gl.int64) * chunks + first_chunk
    value_head = n // SUBHEADS
    key_head = key_head_of(n, groups, SUBHEADS)
    x += key_head.to(gl.int64) * x_head
    y += value_head.to(gl.int64) * y_head
    count = gl.cdiv(stop - start, 64)

    x_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, K], SHARED)
    y_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 128], SHARED)
    decays_s = gl.allocate_shared_memory(gl.float32, [2, 64, K], DECAYS)
    state_s = gl.allocate_shared_memory(gl.bfloat16, [K, 128], SHARED)
    lower_s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    ends_s = gl.allocate_shared_memory(gl.float32, [8, K], LINES)
    points = allocate_points(K)

    offsets = in_states(state, n, heads, STATES, K)
    S = gl.zeros([K, 128], gl.float32, STATES)
    if first is not None:
        S = gl.load(first + offsets)
    survives = gl.zeros([K], gl.float32, OF_STATE)
    lower_triangle(lower_s)
    channels = gl.zeros([64, K], gl.float32, KEYS)
    if count > 0:
        token = start + (count - 1) * 64 if REVERSE else start
        copy_decays(decays_s.index(0), log_decay, token, n * K, stop, heads * K, K)
        copy_keys(x_s.index(0), x, token, 0, stop, x_token, K)
        copy_tokens(y_s.index(0), y, token, 0, stop, y_token)
    async_copy.commit_group()
    for i in range(count):
        c = count - 1 - i if REVERSE else i
        token = start + (c - 1 if REVERSE else c + 1) * 64  # of the chunk after this one, in either direction
        xs, ys, decays = x_s.index(i % 2), y_s.index(i % 2), decays_s.index(i % 2)
        async_copy.wait_group(0)
        barrier()
        end = gl.where(i + 1 < count, stop, token)
        copy_decays(decays_s.index((i + 1) % 2), log_decay, token, n * K, end, heads * K, K)
        copy_keys(x_s.index((i + 1) % 2), x, token, 0, end, x_token, K)
        copy_tokens(y_s.index((i + 1) % 2), y, token, 0, end, y_token)
        async_copy.commit_group()
        sums_of_blocks(ends_s, decays, None if into is None else ends + (place + c) * (8 * K), NARROW, K)
        g = bounded(decays, NARROW, K)
        barrier()
        store_points(points, None, ends_s)
        split(decays, g, NARROW, K)
        fence_async_shared()
        barrier()
        b = from_start(lower_s, decays, channels, NARROW, K)
        entering, within, leaving = of_state(points, OF_STATE)
        survives += entering + within + leaving
        S *= gl.expand_dims(gl.exp2(leaving if REVERSE else entering), 1)
        if into is not None:
            state_s.store(S.to(gl.bfloat16))
        S *= gl.expand_dims(gl.exp2(within), 1)
        rest = gl.exp2(entering if REVERSE else leaving)
        b = waited(b, NARROW)
        exponents, reach = whole_and_rest(b)
        factor = gl.exp2(reach) * scale if REVERSE else gl.exp2(-reach)
        x_ = (xs.load(KEYS).to(gl.float32) * factor).to(gl.bfloat16)
        if REVERSE:
            xs.store(times(x_, exponent_after(exponents, at_start(points, KEYS))))
        else:
            xs.store(times(x_, exponent_before(exponents, at_end(points, KEYS))))
        fence_async_shared()
        barrier()
        S = warpgroup_mma(xs.permute((1, 0)), ys, S, is_async=True)
        if into is not None:
            at = at_tile(into, ((first_chunk + c).to(gl.int64) * heads + n) * K, 0, 128, COPY, K, 128)
            gl.store(at, state_s.load(COPY))
        S = warpgroup_mma_wait(0, deps=[S])
        S *= gl.expand_dims(rest, 1)
    if last is not None:
        gl.store(last + offsets, S)
    if shrunk is not None:
        at = gl.program_id(0).to(gl.int64) * K + gl.arange(0, K, OF_STATE)
        gl.store(shrunk + at, gl.exp2(survives))


@gluon.jit
def of_tiles(a, b, c, d, i):
    """Return the i-th tile of each of four allocations."""
    return a.index(i), b.index(i), c.index(i), d.index(i)


@gluon.jit
def reciprocal(x):
    asm: gl.constexpr = "rcp.approx.ftz.f32 $0, $1;"
    return gl.inline_asm_elementwise(asm, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def erase_at_resets(
    log_decay, log_decay_grad, token, column, stop, stride: gl.constexpr, LAYOUT: gl.constexpr, K: gl.constexpr
):
    """Store zeros as gradients of decays of −inf, or so strong that they count as such."""
    valid = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)), 1) < stop - token
    g = gl.load(at_tile(log_decay, token, column, stride, LAYOUT, 64, K), mask=valid, other=0.0).to(gl.float32)
    zeros = gl.zeros([64, K], log_decay_grad.dtype.element_ty, LAYOUT)
    at = at_tile(log_decay_grad, token, column, stride, LAYOUT, 64, K)
    gl.store(at, zeros, mask=valid & (g * LOG2E <= LEAST))


@gluon.jit(do_not_specialize=["chunks", "groups"])
def gradients(
    q,
    k,
    v,
    grad,
    log_decay,
    states,
    ends,
    q_grad,
    k_grad,
    v_grad,
    log_decay_grad,
    last,
    first,
    segments,
    scale,
    q_head,
    k_head,
    v_head,
    grad_head,
    chunks,
    groups,
    q_token: gl.constexpr,
    k_token: gl.constexpr,
    v_token: gl.constexpr,
    grad_token: gl.constexpr,
    heads: gl.constexpr,
    SUBHEADS: gl.constexpr,
    K: gl.constexpr,
):
    NARROW: gl.constexpr = log_decay.dtype.element_ty == gl.bfloat16
    KEYS: gl.constexpr = ROWS if K == 128 else PAIRS  # layout of a tile [64, K]
    STATES: gl.constexpr = STATE if K == 128 else ROWS
    OF_STATE: gl.constexpr = gl.SliceLayout(1, STATES)
    OF_CHANNELS: gl.constexpr = gl.SliceLayout(0, KEYS)
    OF_TOKENS: gl.constexpr = gl.SliceLayout(1, KEYS)
    STORE: gl.constexpr = OCTETS if K == 128 else NARROW_OCTETS
    n, start, stop, first_chunk, state = segment_of(segments, heads)
    place = n.to(gl.int64) * chunks + first_chunk
    value_head = n // SUBHEADS
    key_head = key_head_of(n, groups, SUBHEADS)
    q += key_head.to(gl.int64) * q_head
    k += key_head.to(gl.int64) * k_head
    v += value_head.to(gl.int64) * v_head
    grad += value_head.to(gl.int64) * grad_head
    count = gl.cdiv(stop - start, 64)

    queries_m = gl.allocate_shared_memory(gl.bfloat16, [1, 64, K], SHARED)  # then what goes into the gradient of b
    keys_m = gl.allocate_shared_memory(gl.bfloat16, [1, 64, K], SHARED)  # likewise
    values_m = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 128], SHARED)
    grad_m = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 128], SHARED)
    decays_m = gl.allocate_shared_memory(gl.float32, [1, 64, K], DECAYS)
    before_m = gl.allocate_shared_memory(gl.bfloat16, [1, K, 128], SHARED)
    after_s = gl.allocate_shared_memory(gl.bfloat16, [K, 128], SHARED)
    enter_m = gl.allocate_shared_memory(gl.bfloat16, [1, 64, K], SHARED)
    leave_m = gl.allocate_shared_memory(gl.bfloat16, [1, 64, K], SHARED)
    pairs_m = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], SHARED)
    scores_m = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], SHARED)
    lower_m = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], SHARED)
    queries_s, keys_s, values_s, grad_s = of_tiles(queries_m, keys_m, values_m, grad_m, 0)
    enter_s, leave_s, pairs_s, scores_s = of_tiles(enter_m, leave_m, pairs_m, scores_m, 0)
    decays_s, before_s, lower_s = decays_m.index(0), before_m.index(0), lower_m.index(0)
    ends_s = reinterpret(pairs_s, gl.float32, [8, K], LINES)  # until there are pairs
    points, middles_s = allocate_points(K), allocate_middles(K)
    through_s = gl.allocate_shared_memory(gl.float32, [K], FLAT)
    itself_s = gl.allocate_shared_memory(gl.float32, [64], FLAT)

    offsets = in_states(state, n, heads, STATES, K)
    dS = gl.zeros([K, 128], gl.float32, STATES)
    if last is not None:
        dS = gl.load(last + offsets)
    rows, pairs = gl.zeros([64, 128], gl.float32, ROWS), gl.zeros([64, 64], gl.float32, PAIRS)
    channels = rows if K == 128 else gl.zeros([64, K], gl.float32, KEYS)
    lower_triangle(lower_s)
    if count > 0:
        token, c = start + (count - 1) * 64, count - 1
        copy_decays(decays_s, log_decay, token, n * K, stop, heads * K, K)
        copy_ends(ends_s, ends, place + c, True, K)
        copy_tokens(values_s, v, token, 0, stop, v_token)
        copy_state(before_s, states, (first_chunk + c).to(gl.int64) * heads + n, True, K)
        async_copy.commit_group()
        copy_keys(queries_s, q, token, 0, stop, q_token, K)
        copy_keys(keys_s, k, token, 0, stop, k_token, K)
        async_copy.commit_group()
    for i in range(count):
        c = count - 1 - i
        zero = opaque(c * 0)  # addresses are computed again, rather than kept in registers for all chunks
        queries_s, keys_s, values_s, grad_s = of_tiles(queries_m, keys_m, values_m, grad_m, zero)
        enter_s, leave_s, pairs_s, scores_s = of_tiles(enter_m, leave_m, pairs_m, scores_m, zero)
        token = start + c * 64
        async_copy.wait_group(1)
        barrier()
        copy_tokens(grad_s, grad, token, 0, stop, grad_token)
        async_copy.commit_group()
        g = bounded(decays_s, NARROW, K)
        store_points(points, middles_s, ends_s)
        barrier()
        entering, within, leaving = of_state(points, OF_STATE)
        dS *= gl.expand_dims(gl.exp2(leaving), 1)
        after_s.store(dS.to(gl.bfloat16))
        split(decays_s, g, NARROW, K)
        fence_async_shared()
        barrier()
        b = from_start(lower_s, decays_s, channels, NARROW, K)
        if log_decay_grad is not None:
            through_s.store(gl.sum(before_s.load(STATES).to(gl.float32) * dS, 1) * gl.exp2(within))
        dS *= gl.expand_dims(gl.exp2(within), 1)
        rest = gl.exp2(entering)
        async_copy.wait_group(1)
        b = waited(b, NARROW)
        barrier()
        steep = steepness(points)
        exponents, reach = whole_and_rest(b)
        exponents_s = reinterpret(decays_s, gl.int16, [2, 64, K], SHARED).index(0)
        factors_s = reinterpret(decays_s, gl.float16, [2, 64, K], SHARED).index(1)
        exponents_s.store(exponents)
        factors_s.store(gl.exp2(reach).to(gl.float16))
        read = (queries_s.load(KEYS).to(gl.float32) * (gl.exp2(reach) * scale)).to(gl.bfloat16)
        written = (keys_s.load(KEYS).to(gl.float32) * gl.exp2(-reach)).to(gl.bfloat16)
        queries_s.store(read)
        keys_s.store(written)
        if steep == 0:
            enter_s.store(times(read, exponent_after(exponents, at_start(points, KEYS))))
            leave_s.store(times(written, exponent_before(exponents, at_end(points, KEYS))))
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        D = warpgroup_mma(grad_s, values_s.permute((1, 0)), pairs, use_acc=False, is_async=True)
        # a token paired with itself does not decay: these pairs stay out of the terms that have to cancel
        itself_s.store(gl.sum(grad_s.load(COPY).to(gl.float32) * values_s.load(COPY).to(gl.float32), 1))
        D = warpgroup_mma_wait(0, deps=[D])
        if steep == 0:
            A = warpgroup_mma(enter_s, leave_s.permute((1, 0)), pairs, use_acc=False, is_async=True)
            dQ = warpgroup_mma(grad_s, before_s.permute((1, 0)), channels, use_acc=False, is_async=True)
            pairs_s.store(gl.where(distance() > 0, D, 0.0).to(gl.bfloat16))
            A = warpgroup_mma_wait(1, deps=[A])
            scores_s.store(gl.where(distance() >= 0, A, 0.0).to(gl.bfloat16))
            fence_async_shared()
            barrier()
            dQ = warpgroup_mma(pairs_s, leave_s, dQ, is_async=True)
            dK = warpgroup_mma(pairs_s.permute((1, 0)), enter_s, channels, use_acc=False, is_async=True)
            dQ, dK = warpgroup_mma_wait(0, deps=[dQ, dK])
            dQ *= power(exponent_after(exponents_s.load(KEYS), at_start(points, KEYS)))
            dK *= power(exponent_before(exponents_s.load(KEYS), at_end(points, KEYS)))
        else:
            zero = opaque(c * 0)
            inputs = of_tiles(queries_m, keys_m, values_m, grad_m, zero)
            room = of_tiles(enter_m, leave_m, pairs_m, scores_m, zero)
            exponents_s = reinterpret(decays_m.index(zero), gl.int16, [2, 64, K], SHARED).index(0)
            others = before_m.index(zero), exponents_s, points, middles_s, steep
            dQ, dK = gradients_by_halves(*inputs, *others, *room, lower_m.index(zero), D, KEYS)
        itself = gl.expand_dims(itself_s.load(OF_TOKENS), 1)
        # Tiles are loaded for each use, and the gradient of q stored before the rest of that of k: registers are short.
        # Later tokens reach back past this one, earlier ones forward. Pairs of two later tokens cancel in the sum of
        # both, so both take the factors as the products took them, rounded to bf16.
        past = queries_s.load(KEYS).to(gl.float32) * dQ - keys_s.load(KEYS).to(gl.float32) * dK
        dQ = (dQ + itself * keys_s.load(KEYS).to(gl.float32)) * (factors_s.load(KEYS).to(gl.float32) * scale)
        store_rows(q_grad, token, n * K, stop, heads * K, dQ, LAYOUT=STORE)
        dK += itself * queries_s.load(KEYS).to(gl.float32)
        if log_decay_grad is not None:
            queries_s.store(past.to(gl.bfloat16))
        T = warpgroup_mma(values_s, after_s.permute((1, 0)), channels, use_acc=False, is_async=True)
        T = warpgroup_mma_wait(0, deps=[T])
        T *= power(exponent_before(exponents_s.load(KEYS), at_end(points, KEYS)))
        dK += T
        if log_decay_grad is not None:
            keys_s.store((keys_s.load(KEYS).to(gl.float32) * T).to(gl.bfloat16))
        store_rows(
            k_grad, token, n * K, stop, heads * K, dK * reciprocal(factors_s.load(KEYS).to(gl.float32)), LAYOUT=STORE
        )
        fence_async_shared()
        barrier()
        if log_decay_grad is not None:
            dg = warpgroup_mma(lower_s, keys_s, channels, use_acc=False, is_async=True)
            dg = warpgroup_mma(lower_s.permute((1, 0)), queries_s, dg, is_async=True)
        dS = warpgroup_mma(enter_s.permute((1, 0)), grad_s, dS, is_async=True)
        dV = warpgroup_mma(leave_s, after_s, rows, use_acc=False, is_async=True)
        dV = warpgroup_mma(scores_s.permute((1, 0)), grad_s, dV, is_async=True)
        # The chunk before; masked rather than skipped, since a branch among products that run would make them wait.
        end = gl.where(c > 0, stop, token - 64)
        copy_decays(decays_s, log_decay, token - 64, n * K, end, heads * K, K)
        copy_ends(ends_s, ends, place + c - 1, c > 0, K)
        copy_tokens(values_s, v, token - 64, 0, end, v_token)
        copy_state(before_s, states, (first_chunk + c - 1).to(gl.int64) * heads + n, c > 0, K)
        async_copy.commit_group()
        if log_decay_grad is not None:
            dg = warpgroup_mma_wait(3, deps=[dg])
            dg += gl.expand_dims(through_s.load(OF_CHANNELS), 0) - keys_s.load(KEYS).to(gl.float32)
            if NARROW:
                store_rows(log_decay_grad, token, n * K, stop, heads * K, dg, LAYOUT=STORE)
            else:
                at = at_tile(log_decay_grad, token, n * K, heads * K, KEYS, 64, K)
                valid = gl.expand_dims(gl.arange(0, 64, OF_TOKENS), 1) < stop - token
                gl.store(at, dg, mask=valid)
        dS = warpgroup_mma_wait(2, deps=[dS])
        barrier()
        copy_keys(queries_s, q, token - 64, 0, end, q_token, K)
        copy_keys(keys_s, k, token - 64, 0, end, k_token, K)
        async_copy.commit_group()
        dS *= gl.expand_dims(rest, 1)
        dV = warpgroup_mma_wait(0, deps=[dV])
        store_rows(v_grad, token, n * 128, stop, heads * 128, dV, LAYOUT=OCTETS)
        if log_decay_grad is not None and steep == 2:
            barrier()
            erase_at_resets(log_decay, log_decay_grad, token, n * K, stop, heads * K, KEYS, K)
    if first is not None:
        gl.store(first + offsets, dS)
