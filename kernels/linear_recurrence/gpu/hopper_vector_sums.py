"""Decays of a chunk on Hopper: copies to shared memory, sums over time, reference points (`hopper_vector_decay.py`)."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from ...gpu.gluon_halves import LEAST, LOG2E, SAFE, plus, store_middles, store_parts
from ...gpu.gluon_tiles import (
    COPY,
    FLAT,
    NARROW_COPY,
    PAIRS,
    ROWS,
    SHARED,
    async_load,
    at_tile,
    copy_tokens,
    opaque,
    reinterpret,
)

LEAST_NARROW = gl.constexpr(-106.0)  # the same for decays in bf16, which stay natural logarithms until they are summed
COPY_DECAYS = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [8, 1], [1, 0]))
COPY_FEW_DECAYS = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [8, 1], [1, 0]))  # of 64 channels
COLUMNS = gl.constexpr(gl.BlockedLayout([32, 1], [1, 32], [2, 4], [0, 1]))  # half a column a thread
LINE = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [8, 1], [1, 0]))
EIGHTS = gl.constexpr(gl.BlockedLayout([8, 1], [1, 32], [1, 8], [1, 0]))  # 8 numbers of a channel a thread
OF_MIDDLES = gl.constexpr(gl.BlockedLayout([8, 4, 1], [1, 1, 32], [1, 1, 8], [2, 1, 0]))
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
        store_middles(middles, b, OF_MIDDLES)


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
