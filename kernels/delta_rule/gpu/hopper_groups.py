"""Building blocks of passes along time in Gluon whose work is shared by groups of four warps: a block of 64 values is
the rows of all products, and a state is transposed.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...gpu.gluon_tiles import async_load, at_tile, last_steps

COPIERS = gl.constexpr(128)  # threads that copy
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))  # rows of 128
COPY_PAIRS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # rows of 64
STATE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))  # values × channels of keys
PAIRS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))  # values × tokens
OF_ROWS, OF_COLUMNS = gl.constexpr(gl.SliceLayout(1, PAIRS)), gl.constexpr(gl.SliceLayout(0, PAIRS))
OF_STATE, OF_PAIRS = gl.constexpr(gl.DotOperandLayout(0, STATE, 2)), gl.constexpr(gl.DotOperandLayout(0, PAIRS, 2))


@gluon.jit
def copy_block(shared, x, token, column, stop, stride: gl.constexpr):
    """Start to copy a block [64, 64] of the values of a chunk; zeros from token `stop` on."""
    r = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, COPY_PAIRS)), 1)
    async_load(shared, at_tile(x, token, column, stride, COPY_PAIRS, 64, 64), mask=r < stop - token)


@gluon.jit
def write_block(x, token, column, stop, stride: gl.constexpr, block, STEPS: gl.constexpr = 1):
    """Store a block [64, 64] that is in shared memory; of `STEPS` rows per token only the last."""
    r = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, COPY_PAIRS)), 1)
    at = at_tile(x, token, column, stride, COPY_PAIRS, 64, 64, STEPS)
    gl.store(at, block.load(COPY_PAIRS), mask=last_steps(r, token, stop, STEPS))


@gluon.jit
def in_state(column, V: gl.constexpr):
    """Offsets of a transposed block [64 values, 128] of a state [128, V]."""
    value = gl.expand_dims(column + gl.arange(0, 64, gl.SliceLayout(1, STATE)), 1)
    return value + gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, STATE)) * V, 0)
