"""Building blocks of the kernels in Gluon, for Hopper and eight warps: layouts, tiles of 64 tokens and 128 channels."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

# names of Triton 3.6 and 3.7, and those of 3.7 or 3.9
barrier = getattr(gl, "thread_barrier", None) or gl.barrier
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_shared = gl.shared_memory_descriptor
reinterpret = getattr(_shared, "reinterpret", None) or _shared._reinterpret
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))  # 16 bytes a thread, rows of 128
ROWS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 64, 16]))  # tokens × channels
PAIRS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))  # tokens × tokens
STATE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 128, 16]))
NARROW_STATE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 64, 16]))  # of 64 value channels
# As `ROWS`, but each thread has 4 (`QUADS`) or 8 (`OCTETS`) neighbouring columns. Eight take half as many stores, but
# Triton exchanges them through shared memory. Which of them is faster depends on the kernel.
QUADS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 16], [0, 32], [8, 0]],
        [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0], [0, 64]],
        [],
        [64, 128],
    )
)
OCTETS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0], [0, 64]],
        [],
        [64, 128],
    )
)
# `COPY` and `OCTETS` of tiles with 64 channels
NARROW_COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
NARROW_OCTETS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0], [0, 32]],
        [],
        [64, 64],
    )
)
SHARED_LAYOUT = gl.NVMMASharedLayout(128, 16, 2)  # for the host
SHARED = gl.constexpr(SHARED_LAYOUT)
OF_ROWS, OF_COLUMNS = gl.constexpr(gl.SliceLayout(1, PAIRS)), gl.constexpr(gl.SliceLayout(0, PAIRS))
OF_TOKENS, OF_CHANNELS = gl.constexpr(gl.SliceLayout(1, ROWS)), gl.constexpr(gl.SliceLayout(0, ROWS))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def opaque(x):
    """Return x unchanged, so that the compiler computes what depends on it in place instead of moving it out of a loop,
    into registers.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def done(bar):
    """Arrive at a barrier once all warps of this group are here."""
    barrier()
    mbarrier.arrive(bar, count=1)


@gluon.jit
def segment_of(segments, heads: gl.constexpr):
    """Recurrence of a program; of its segment: first token, one past the last, first chunk, and row of its states."""
    segment, n = gl.program_id(0) // heads, gl.program_id(0) % heads
    at = segments + segment * 5
    start = gl.load(at)
    return n, start, start + gl.load(at + 1), gl.load(at + 2), gl.load(at + 4)


@gluon.jit
def key_head_of(n, groups, SUBHEADS: gl.constexpr):
    """The key head of a recurrence, whose value head is n // SUBHEADS."""
    return (n // SUBHEADS // groups) * SUBHEADS + n % SUBHEADS


@gluon.jit
def in_states(
    state, n, heads: gl.constexpr, LAYOUT: gl.constexpr = STATE, K: gl.constexpr = 128, V: gl.constexpr = 128
):
    """Offsets of one state [K,V] among states [·,heads,K,V]."""
    row, column = gl.arange(0, K, gl.SliceLayout(1, LAYOUT)), gl.arange(0, V, gl.SliceLayout(0, LAYOUT))
    offsets = gl.expand_dims(row * V, 1) + gl.expand_dims(column, 0)
    return offsets + (state.to(gl.int64) * heads + n) * (K * V)


@gluon.jit
def distance():
    """Number of tokens from the key of a pair to its query."""
    return gl.expand_dims(opaque(gl.arange(0, 64, OF_ROWS)), 1) - gl.expand_dims(gl.arange(0, 64, OF_COLUMNS), 0)


@gluon.jit
def at_tile(
    x,
    start,
    column,
    stride: gl.constexpr,
    LAYOUT: gl.constexpr,
    R: gl.constexpr,
    C: gl.constexpr,
    STEPS: gl.constexpr = 1,
):
    """Addresses of the tile [R, C] that begins at a row and a column; `STEPS` rows share a row of x.

    All of the offset is one number, so that no part of it is kept from chunk to chunk in registers that are short.
    """
    r = gl.expand_dims(opaque(gl.arange(0, R, gl.SliceLayout(1, LAYOUT))), 1)
    c = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(0, LAYOUT)), 0)
    row = start + r
    if STEPS > 1:
        row = row // STEPS
    return x + (row.to(gl.int64) * stride + (column + c))


@gluon.jit
def last_steps(r, start, stop, STEPS: gl.constexpr):
    """Return which rows r from `start` on are the last of the `STEPS` rows of a token, and before `stop`."""
    valid = r < stop - start
    if STEPS > 1:
        valid = valid & ((start + r) % STEPS == STEPS - 1)
    return valid


@gluon.jit
def copy_tokens(
    shared,
    x,
    start,
    column,
    stop,
    stride: gl.constexpr,
    LAYOUT: gl.constexpr = COPY,
    STEPS: gl.constexpr = 1,
    C: gl.constexpr = 128,
):
    """Start to copy a tile [64, C] of rows from `start` on; zeros from row `stop` on.

    With several `STEPS` per token, x has one row per token, which goes to the last of them; the others are zeros.
    """
    r = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)), 1)
    at = at_tile(x, start, column, stride, LAYOUT, 64, C, STEPS)
    async_load(shared, at, mask=last_steps(r, start, stop, STEPS))


@gluon.jit
def copy_pairs(shared, x, tile, LAYOUT: gl.constexpr = NARROW_COPY):
    """Start to copy a tile [64, 64] of pairs of tokens."""
    async_load(shared, at_tile(x, tile * 64, 0, 64, LAYOUT, 64, 64))


@gluon.jit
def copy_state(shared, x, tile, wanted, K: gl.constexpr = 128, V: gl.constexpr = 128, LAYOUT: gl.constexpr = COPY):
    """Start to copy a state [K, V], if it is wanted."""
    r = gl.expand_dims(gl.arange(0, K, gl.SliceLayout(1, LAYOUT)), 1)
    async_load(shared, at_tile(x, tile * K, 0, V, LAYOUT, K, V), mask=(r >= 0) & wanted)


@gluon.jit
def store_rows(
    x, start, column, stop, stride: gl.constexpr, value, STEPS: gl.constexpr = 1, LAYOUT: gl.constexpr = QUADS
):
    """Store a tile of 64 rows in bf16, in the layout `QUADS` or `OCTETS`, or `NARROW_OCTETS` for 64 columns.

    Of `STEPS` rows per token, only the last is stored.
    """
    tile = gl.convert_layout(value.to(gl.bfloat16), LAYOUT)
    r = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)), 1)
    at = at_tile(x, start, column, stride, LAYOUT, 64, value.shape[1], STEPS)
    gl.store(at, tile, mask=last_steps(r, start, stop, STEPS))
