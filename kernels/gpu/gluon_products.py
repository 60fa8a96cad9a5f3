"""Persistent matrix products in Gluon, on which kernels for bf16 on Hopper build.

Each multiprocessor has one program, which computes tile after tile, with groups of warps that share the work:

    copies      bring blocks of both factors, 64 steps of the sum at a time, into rings of buffers
    products    two groups, each with 128 × 128 numbers of a tile; they hand them over in shared memory
    consumer    what a kernel does with the tiles, while the products of the next tile run

A tile is 256 rows and 128 columns of a product or, with `PAIR`, 128 rows and 128 columns of two: the second factor then
has two blocks of columns, `PAIR` columns apart. The order of the sums does not depend on the number of rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..core.allocation import aligned
from .gluon_tiles import SHARED, SHARED_LAYOUT, barrier, done

SIDE, STEP = 128, 64  # rows and columns of the product of one group, and terms of a step of the sum
WIDTH, INNER = gl.constexpr(SIDE), gl.constexpr(STEP)
AHEAD = gl.constexpr(3)  # buffers of each ring
STRIP = gl.constexpr(16)  # rows of a tile that a consumer has in registers at a time
PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))  # 16 bytes a thread
UNIT = 8  # numbers in 16 bytes


@gluon.jit
def place(tile, across, down=None):
    """Row and column of a tile, in tiles, and its part of the sum, if `down` rows of tiles repeat for each part."""
    part = 0
    if down is not None:
        tile, part = tile % (down * across), tile // (down * across)
    return tile // across, tile % across, part


@gluon.jit
def copy_block(x, shared, bar, start, inner, INNER_FIRST: gl.constexpr):
    """Start to copy a block; the rows of x are steps of the sum if `INNER_FIRST`."""
    if INNER_FIRST:
        tma.async_copy_global_to_shared(x, [inner, start], bar, shared)
    else:
        tma.async_copy_global_to_shared(x, [start, inner], bar, shared)


@gluon.jit
def copies(
    a, b, a_s, b_s, full, empty, tiles, across, down, steps,
    A_TURNED: gl.constexpr, B_TURNED: gl.constexpr, PAIR: gl.constexpr,
):  # fmt: skip
    """Bring the blocks of all tiles of this program; zeros where a factor ends."""
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, column, part = place(tile, across, down)
        for k in range(steps):
            i = step % AHEAD
            bar = full.index(i)
            mbarrier.wait(empty.index(i), ((step // AHEAD) & 1) ^ 1)
            mbarrier.expect(bar, 3 * WIDTH * INNER * 2)
            inner = (part * steps + k) * INNER
            n = column * WIDTH
            if PAIR:
                copy_block(a, a_s.index(i), bar, row * WIDTH, inner, A_TURNED)
                copy_block(b, b_s.index(2 * i), bar, n, inner, not B_TURNED)
                copy_block(b, b_s.index(2 * i + 1), bar, PAIR + n, inner, not B_TURNED)
            else:
                copy_block(a, a_s.index(2 * i), bar, 2 * row * WIDTH, inner, A_TURNED)
                copy_block(a, a_s.index(2 * i + 1), bar, (2 * row + 1) * WIDTH, inner, A_TURNED)
                copy_block(b, b_s.index(i), bar, n, inner, not B_TURNED)
            step += 1


@gluon.jit
def store_part(y, M, N: gl.constexpr, sums, row, column, part):
    """Store what one group has of a part of a tile, in fp32."""
    rows = row + gl.arange(0, WIDTH, gl.SliceLayout(1, PRODUCT))
    columns = column + gl.arange(0, WIDTH, gl.SliceLayout(0, PRODUCT))
    at = y + (gl.expand_dims((part * M + rows).to(gl.int64) * N, 1) + gl.expand_dims(columns, 0))
    gl.store(at, sums, mask=gl.expand_dims(rows < M, 1) & gl.expand_dims(columns < N, 0))


@gluon.jit
def products(
    parts, a_s, b_s, tiles_s, full, empty, ready, free, tiles, across, down, steps,
    GROUP: gl.constexpr, A_TURNED: gl.constexpr, B_TURNED: gl.constexpr, PAIR: gl.constexpr,
):  # fmt: skip
    """Compute one of the two products of a tile, or one half of its rows, which is stored in `parts`, if given."""
    step = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        sums = gl.zeros([WIDTH, WIDTH], gl.float32, PRODUCT)
        for k in range(steps):
            i = step % AHEAD
            mbarrier.wait(full.index(i), (step // AHEAD) & 1)
            if PAIR:
                right, left = b_s.index(2 * i + GROUP), a_s.index(i)
            else:
                left, right = a_s.index(2 * i + GROUP), b_s.index(i)
            if A_TURNED:
                left = left.permute((1, 0))
            if B_TURNED:
                right = right.permute((1, 0))
            sums = warpgroup_mma(left, right, sums, use_acc=k > 0, is_async=True)
            # A buffer is given back one step late, so that two products are always under way.
            sums = warpgroup_mma_wait(1, deps=[sums])
            if k > 0:
                done(empty.index((step + AHEAD - 1) % AHEAD))
            step += 1
        sums = warpgroup_mma_wait(0, deps=[sums])
        done(empty.index((step + AHEAD - 1) % AHEAD))
        if parts is not None:
            row, column, part = place(tile, across, down)
            store_part(*parts, sums, (2 * row + GROUP) * WIDTH, column * WIDTH, part)
        else:
            mbarrier.wait(free, phase ^ 1)
            tiles_s.index(GROUP).store(sums.to(gl.bfloat16))
            done(ready)
            phase ^= 1


@gluon.jit
def consume(consumer: gl.constexpr, tiles_s, ready, free, tiles, outputs):
    """Call a consumer; a list of groups cannot hold a function that is an argument."""
    consumer(tiles_s, ready, free, tiles, outputs)


@gluon.jit
def product(
    consumer: gl.constexpr,  # called with the buffers of a tile, the barriers `ready` and `free`, `tiles` and `outputs`
    outputs,
    a,  # descriptor of [M,K], or turned of [K,M]
    b,  # descriptor of [K,N], or turned of [N,K]
    tiles,
    across,  # tiles in a row
    steps,  # of the sum, or of a part of it
    A_TURNED: gl.constexpr,
    B_TURNED: gl.constexpr,
    PAIR: gl.constexpr = 0,
    down=None,  # tiles in a column, if the sum may have parts
    parts=None,  # [parts,M,N] in fp32, M and N, if the groups store their sums instead of handing them over
):
    """Run the groups of warps."""
    A: gl.constexpr = AHEAD if PAIR else 2 * AHEAD  # left and right blocks of a step together are three
    B: gl.constexpr = 3 * AHEAD - A
    a_s = gl.allocate_shared_memory(gl.bfloat16, [A, INNER, WIDTH] if A_TURNED else [A, WIDTH, INNER], SHARED)
    b_s = gl.allocate_shared_memory(gl.bfloat16, [B, WIDTH, INNER] if B_TURNED else [B, INNER, WIDTH], SHARED)
    tiles_s = gl.allocate_shared_memory(gl.bfloat16, [2, WIDTH, WIDTH], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], mbarrier.MBarrierLayout())
    tile_barriers = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ready, free = tile_barriers.index(0), tile_barriers.index(1)
    for i in gl.static_range(AHEAD):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)  # both groups of products read each block
    mbarrier.init(ready, count=2)
    mbarrier.init(free, count=1)
    barrier()
    # fmt: off
    gl.warp_specialize(
        [
            (products, (parts, a_s, b_s, tiles_s, full, empty, ready, free, tiles, across, down, steps,
                        0, A_TURNED, B_TURNED, PAIR)),
            (products, (parts, a_s, b_s, tiles_s, full, empty, ready, free, tiles, across, down, steps,
                        1, A_TURNED, B_TURNED, PAIR)),
            (consume, (consumer, tiles_s, ready, free, tiles if parts is None else 0, outputs)),
            (copies, (a, b, a_s, b_s, full, empty, tiles, across, down, steps, A_TURNED, B_TURNED, PAIR)),
        ],
        [4, 4, 1],
        [168, 152, 24],
    )
    # fmt: on


def fitting(x: Tensor, by_columns: bool) -> Tensor:
    """x, copied unless it is stored by rows, or by columns if that is allowed, which begin at multiples of 16 bytes."""
    for y in (x, x.T) if by_columns else (x,):
        if y.stride(1) == 1 and y.stride(0) % UNIT == 0 and y.stride(0) >= y.shape[1]:
            return aligned(x)
    if by_columns:
        return fitting(x.T, False).T
    return x.clone(memory_format=torch.contiguous_format).view(-1).view(x.shape)  # with the stride also of one row


def turned(x: Tensor) -> bool:
    """Return whether a matrix is stored by columns."""
    return x.stride(1) != 1


def described(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A matrix that is copied in blocks of this size to shared memory; one that is stored by columns is turned."""
    if turned(x):
        x, rows, columns = x.T, columns, rows
    return TensorDescriptor.from_tensor(x, [rows, columns], SHARED_LAYOUT)
