"""Matrix products in Gluon whose order of sums does not depend on the number of rows (Hopper, bf16).

A tile of the result has 256 rows and 128 columns. The kernel is persistent: each multiprocessor has one program, which
computes tile after tile, with groups of warps that share the work:

    copies      bring blocks of both factors, 64 steps of the sum at a time, into rings of buffers
    products    two groups, each with half of the rows; they hand their tiles over in shared memory
    results     store the tiles in bf16, while the products of the next tile run

A product with few tiles, as the gradient of a weight is, may be divided along the sum: its parts are stored in fp32 by
the groups that compute them, and added in order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...core.allocation import aligned, new
from ...gpu.device import multiprocessors
from ...gpu.gluon_tiles import SHARED, SHARED_LAYOUT, at_tile, barrier, done
from ...gpu.launch import cdiv, enqueue

TILE, STEP = (256, 128), 64  # rows and columns of a tile, and terms of a step of the sum
WIDTH = gl.constexpr(TILE[1])  # columns of a tile, and rows of one group
INNER = gl.constexpr(STEP)
AHEAD = gl.constexpr(3)  # buffers of each ring
STRIP = gl.constexpr(16)  # rows of a tile that `results` has in registers at a time
PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))  # 16 bytes a thread
MOST_PARTS, LEAST_STEPS = 8, 16  # into which a sum is divided, and steps of a part
STORED = 12  # steps that take as long as storing a tile of a part and reading it again, by a bandwidth of 4 TB/s
BLOCK = 1024  # numbers of the result in a program that adds parts
UNIT = 8  # numbers in 16 bytes


@gluon.jit
def place(tile, down, across, steps):
    """First row, first column and first step of a tile."""
    within = tile % (down * across)
    return within // across * (2 * WIDTH), within % across * WIDTH, tile // (down * across) * steps


@gluon.jit
def copies(
    a, b, a_s, b_s, full, empty, tiles, down, across, steps, A_TURNED: gl.constexpr, B_TURNED: gl.constexpr
):  # fmt: skip
    """Bring the blocks of all tiles of this program; zeros where a factor ends."""
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        m, n, first = place(tile, down, across, steps)
        for k in range(steps):
            i = step % AHEAD
            bar = full.index(i)
            mbarrier.wait(empty.index(i), ((step // AHEAD) & 1) ^ 1)
            mbarrier.expect(bar, 3 * WIDTH * INNER * 2)
            inner = (first + k) * INNER
            if A_TURNED:
                tma.async_copy_global_to_shared(a, [inner, m], bar, a_s.index(2 * i))
                tma.async_copy_global_to_shared(a, [inner, m + WIDTH], bar, a_s.index(2 * i + 1))
            else:
                tma.async_copy_global_to_shared(a, [m, inner], bar, a_s.index(2 * i))
                tma.async_copy_global_to_shared(a, [m + WIDTH, inner], bar, a_s.index(2 * i + 1))
            if B_TURNED:
                tma.async_copy_global_to_shared(b, [n, inner], bar, b_s.index(i))
            else:
                tma.async_copy_global_to_shared(b, [inner, n], bar, b_s.index(i))
            step += 1


@gluon.jit
def store_part(y, sums, m, n, part, M, N: gl.constexpr):
    """Store what one group has of a part of a tile, in fp32."""
    row = m + gl.arange(0, WIDTH, gl.SliceLayout(1, PRODUCT))
    column = n + gl.arange(0, WIDTH, gl.SliceLayout(0, PRODUCT))
    at = y + (gl.expand_dims((part * M + row).to(gl.int64) * N, 1) + gl.expand_dims(column, 0))
    gl.store(at, sums, mask=gl.expand_dims(row < M, 1) & gl.expand_dims(column < N, 0))


@gluon.jit
def products(
    y, a_s, b_s, tiles_s, full, empty, ready, free, M, tiles, down, across, steps,
    N: gl.constexpr, GROUP: gl.constexpr, A_TURNED: gl.constexpr, B_TURNED: gl.constexpr, DIVIDED: gl.constexpr,
):  # fmt: skip
    """Compute one half of the rows of each tile."""
    step = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        sums = gl.zeros([WIDTH, WIDTH], gl.float32, PRODUCT)
        for k in range(steps):
            i = step % AHEAD
            mbarrier.wait(full.index(i), (step // AHEAD) & 1)
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
        if DIVIDED:
            m, n, first = place(tile, down, across, steps)
            store_part(y, sums, m + GROUP * WIDTH, n, first // steps, M, N)
        else:
            mbarrier.wait(free, phase ^ 1)
            tiles_s.index(GROUP).store(sums.to(gl.bfloat16))
            done(ready)
            phase ^= 1


@gluon.jit
def results(
    y, tiles_s, ready, free, M, tiles, down, across, steps,
    y_row: gl.constexpr, N: gl.constexpr, DIVIDED: gl.constexpr,
):  # fmt: skip
    """Store the tiles, unless the groups that compute them do."""
    STRIPS: gl.constexpr = WIDTH // STRIP
    r = gl.expand_dims(gl.arange(0, STRIP, gl.SliceLayout(1, ROWS)), 1)
    c = gl.expand_dims(gl.arange(0, WIDTH, gl.SliceLayout(0, ROWS)), 0)
    phase = 0
    for tile in range(gl.program_id(0), 0 if DIVIDED else tiles, gl.num_programs(0)):
        m, n, _ = place(tile, down, across, steps)
        mbarrier.wait(ready, phase)
        for strip in gl.static_range(2 * STRIPS):
            part = tiles_s.index(strip // STRIPS).slice(strip % STRIPS * STRIP, STRIP, 0).load(ROWS)
            if strip == 2 * STRIPS - 1:
                done(free)
            row = m + strip * STRIP
            inside = (row + r < M) & (n + c < N)
            gl.store(at_tile(y, row, n, y_row, ROWS, STRIP, WIDTH), part, mask=inside)
        phase ^= 1


@gluon.jit(do_not_specialize=["M", "steps", "parts"])
def product_tiles(
    y,  # [M,N], or [parts,M,N] in fp32
    a,  # descriptor of [M,K], or turned of [K,M]
    b,  # descriptor of [K,N], or turned of [N,K]
    M,
    steps,  # of a part
    parts,
    y_row: gl.constexpr,
    N: gl.constexpr,
    A_TURNED: gl.constexpr,
    B_TURNED: gl.constexpr,
    DIVIDED: gl.constexpr,
):
    down, across = gl.cdiv(M, 2 * WIDTH), (N + WIDTH - 1) // WIDTH
    tiles = down * across * parts
    a_s = gl.allocate_shared_memory(
        gl.bfloat16, [2 * AHEAD, INNER, WIDTH] if A_TURNED else [2 * AHEAD, WIDTH, INNER], SHARED
    )
    b_s = gl.allocate_shared_memory(gl.bfloat16, [AHEAD, WIDTH, INNER] if B_TURNED else [AHEAD, INNER, WIDTH], SHARED)
    tiles_s = gl.allocate_shared_memory(gl.bfloat16, [2, WIDTH, WIDTH], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], mbarrier.MBarrierLayout())
    tile_barriers = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ready, free = tile_barriers.index(0), tile_barriers.index(1)
    for i in gl.static_range(AHEAD):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)  # both groups read each block
    mbarrier.init(ready, count=2)
    mbarrier.init(free, count=1)
    barrier()
    # fmt: off
    gl.warp_specialize(
        [
            (products, (y, a_s, b_s, tiles_s, full, empty, ready, free, M, tiles, down, across, steps,
                        N, 0, A_TURNED, B_TURNED, DIVIDED)),
            (products, (y, a_s, b_s, tiles_s, full, empty, ready, free, M, tiles, down, across, steps,
                        N, 1, A_TURNED, B_TURNED, DIVIDED)),
            (results, (y, tiles_s, ready, free, M, tiles, down, across, steps, y_row, N, DIVIDED)),
            (copies, (a, b, a_s, b_s, full, empty, tiles, down, across, steps, A_TURNED, B_TURNED)),
        ],
        [4, 4, 1],
        [168, 152, 24],
    )
    # fmt: on


@triton.jit
def add_tiles(parts, y, size, count, y_row, N, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(parts + at, mask=at < size, other=0.0)
    for part in range(1, count):
        total += tl.load(parts + tl.cast(part, tl.int64) * size + at, mask=at < size, other=0.0)
    tl.store(y + at // N * y_row + at % N, total.to(y.dtype.element_ty), mask=at < size)


def add_parts(parts: Tensor, y: Tensor) -> None:
    """Write the sum of parts [S,M,N] in fp32 to y [M,N], added in order."""
    count, _, N = parts.shape
    enqueue(add_tiles, cdiv(y.numel(), BLOCK), *(parts, y, y.numel(), count, y.stride(0), N), BLOCK=BLOCK)


def parts_of(tiles: int, steps: int, programs: int) -> int:
    """The number of parts of a sum with which the slowest program is done first."""

    def time(parts: int) -> int:
        return cdiv(tiles * parts, programs) * (cdiv(steps, parts) + (STORED if parts > 1 else 0))

    return min(range(1, max(1, min(MOST_PARTS, steps // LEAST_STEPS)) + 1), key=time)


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


def _described(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A matrix that is copied in blocks of this size to shared memory; one that is stored by columns is turned."""
    if turned(x):
        x, rows, columns = x.T, columns, rows
    return TensorDescriptor.from_tensor(x, [rows, columns], SHARED_LAYOUT)


def multiply(a: Tensor, b: Tensor, y: Tensor, *, divide: bool) -> None:
    """Write a [M,K] times b [K,N] to y [M,N].

    Args:
        a: bf16, like all. K is a multiple of 8; with `divide`, M is, and a is stored by columns.
        b: N is a multiple of 8.
        y: By rows, which begin at multiples of 16 bytes.
        divide: Whether the sum may have a number of parts that depends on all sizes.
    """
    (M, K), N, (rows, columns) = a.shape, b.shape[1], TILE
    programs, steps, tiles = multiprocessors(y.device), cdiv(K, STEP), cdiv(M, rows) * cdiv(N, columns)
    parts = parts_of(tiles, steps, programs) if divide else 1
    to = y if parts == 1 else new(y, parts, M, N, dtype=torch.float32)
    a, b = fitting(a, divide), fitting(b, not divide)
    factors = _described(a, rows // 2, STEP), _described(b, STEP, columns)
    enqueue(
        product_tiles,
        min(programs, tiles * parts),
        *(to, *factors, M, cdiv(steps, parts), parts),
        y_row=y.stride(0),
        N=N,
        A_TURNED=turned(a),
        B_TURNED=turned(b),
        DIVIDED=parts > 1,
    )
    if parts > 1:
        add_parts(to, y)
