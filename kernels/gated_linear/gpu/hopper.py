"""Fused kernels of a gated MLP in Gluon: a matrix product and the gate, forward and backward (Hopper, bf16).

    forward     gate, up = x W_gateᵀ, x W_upᵀ      h = activation(gate) ⊙ up
    backward    dh = dy W_down      dgate = dh ⊙ up ⊙ activation'(gate)      dup = dh ⊙ activation(gate)

The backward pass also recomputes h, unless it was kept. Each product is rounded to bf16, as in memory.

The kernels are persistent: each multiprocessor has one program, which computes tile after tile. A tile is 128 columns
of gate and the same columns of up, or 256 rows and 128 columns of dh. Groups of warps share the work, so that the
elementwise part of a tile overlaps with the product of the next one:

    copies      bring blocks of both factors, 64 channels at a time, into rings of buffers
    products    two groups: gate and up, or the two halves of dh; they hand their tiles over in shared memory
    results     activation(gate) ⊙ up; store gate, up and h (forward)
    gradients   read gate and up ahead of dh; store their gradients and h (backward)
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...core.allocation import aligned
from ...gpu.device import multiprocessors
from ...gpu.gluon_tiles import SHARED, SHARED_LAYOUT, at_tile, barrier, done
from ...gpu.launch import enqueue
from . import select

WIDTH = gl.constexpr(select.WIDTH)  # rows and columns of the product of one group
INNER = gl.constexpr(select.INNER)  # channels of a step
AHEAD = gl.constexpr(3)  # buffers of each ring
PART = gl.constexpr(16)  # rows of a tile that a group has in registers at a time
PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))  # 16 bytes a thread


@gluon.jit
def buffers(FORWARD: gl.constexpr):
    """Allocate the rings of input blocks, the tiles that are handed over, and their barriers."""
    A: gl.constexpr = 1 if FORWARD else 2  # left blocks per step; left and right blocks together are three
    a_s = gl.allocate_shared_memory(gl.bfloat16, [A * AHEAD, WIDTH, INNER], SHARED)
    b_s = gl.allocate_shared_memory(
        gl.bfloat16, [2 * AHEAD, WIDTH, INNER] if FORWARD else [AHEAD, INNER, WIDTH], SHARED
    )
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
    return a_s, b_s, tiles_s, full, empty, ready, free


@gluon.jit
def copies(a, b, a_s, b_s, full, empty, tiles, K: gl.constexpr, I: gl.constexpr, FORWARD: gl.constexpr):
    """Bring the blocks of all tiles of this program; zeros where a factor ends."""
    STEPS: gl.constexpr = (K + INNER - 1) // INNER
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        m, n = tile // (I // WIDTH), tile % (I // WIDTH) * WIDTH
        for k in range(STEPS):
            i = step % AHEAD
            bar = full.index(i)
            mbarrier.wait(empty.index(i), ((step // AHEAD) & 1) ^ 1)
            mbarrier.expect(bar, 3 * WIDTH * INNER * 2)
            if FORWARD:
                tma.async_copy_global_to_shared(a, [m * WIDTH, k * INNER], bar, a_s.index(i))
                tma.async_copy_global_to_shared(b, [n, k * INNER], bar, b_s.index(2 * i))
                tma.async_copy_global_to_shared(b, [I + n, k * INNER], bar, b_s.index(2 * i + 1))
            else:
                tma.async_copy_global_to_shared(a, [2 * m * WIDTH, k * INNER], bar, a_s.index(2 * i))
                tma.async_copy_global_to_shared(a, [(2 * m + 1) * WIDTH, k * INNER], bar, a_s.index(2 * i + 1))
                tma.async_copy_global_to_shared(b, [k * INNER, n], bar, b_s.index(i))
            step += 1


@gluon.jit
def products(
    a_s, b_s, tiles_s, full, empty, ready, free, tiles, GROUP: gl.constexpr, K: gl.constexpr, FORWARD: gl.constexpr
):
    """Compute one of the two products of a tile: gate or up, or one half of the rows of dh."""
    STEPS: gl.constexpr = (K + INNER - 1) // INNER
    step = 0
    phase = 0
    for _tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        sums = gl.zeros([WIDTH, WIDTH], gl.float32, PRODUCT)
        for k in range(STEPS):
            i = step % AHEAD
            mbarrier.wait(full.index(i), (step // AHEAD) & 1)
            if FORWARD:
                right = b_s.index(2 * i + GROUP).permute((1, 0))
                sums = warpgroup_mma(a_s.index(i), right, sums, use_acc=k > 0, is_async=True)
            else:
                sums = warpgroup_mma(a_s.index(2 * i + GROUP), b_s.index(i), sums, use_acc=k > 0, is_async=True)
            # A buffer is given back one step late, so that two products are always under way.
            sums = warpgroup_mma_wait(1, deps=[sums])
            if k > 0:
                done(empty.index((step + AHEAD - 1) % AHEAD))
            step += 1
        sums = warpgroup_mma_wait(0, deps=[sums])
        done(empty.index((step + AHEAD - 1) % AHEAD))
        mbarrier.wait(free, phase ^ 1)
        tiles_s.index(GROUP).store(sums.to(gl.bfloat16))
        done(ready)
        phase ^= 1


@gluon.jit
def addresses(x, row, column, stride: gl.constexpr, M):
    """Return the addresses of a part of a tile, and the mask of its rows."""
    r = gl.expand_dims(gl.arange(0, PART, gl.SliceLayout(1, ROWS)), 1)
    # `r < M - row` would spill registers
    return at_tile(x, row, column, stride, ROWS, PART, WIDTH), row + r < M


@gluon.jit
def load_factors(gate_up, row, column, M, I: gl.constexpr):
    """Load the same part of gate and of up."""
    at, exists = addresses(gate_up, row, column, 2 * I, M)
    gate = gl.load(at, mask=exists, other=0.0)
    at, exists = addresses(gate_up, row, I + column, 2 * I, M)
    return gate, gl.load(at, mask=exists, other=0.0)


@gluon.jit
def store(x, row, column, stride: gl.constexpr, M, value):
    """Store a part of a tile in bf16."""
    at, exists = addresses(x, row, column, stride, M)
    gl.store(at, value.to(gl.bfloat16), mask=exists)


@gluon.jit
def sigmoid(x):
    return 1 / (1 + gl.exp2(x * -1.4426950408889634))


@gluon.jit
def results(gate_up, h, tiles_s, ready, free, tiles, M, I: gl.constexpr, SILU: gl.constexpr):
    """Store the gated product and, if `gate_up` is given, gate and up."""
    PARTS: gl.constexpr = WIDTH // PART
    phase = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        first, column = tile // (I // WIDTH) * WIDTH, tile % (I // WIDTH) * WIDTH
        mbarrier.wait(ready, phase)
        for part in gl.static_range(PARTS):
            gate = tiles_s.index(0).slice(part * PART, PART, 0).load(ROWS)
            up = tiles_s.index(1).slice(part * PART, PART, 0).load(ROWS)
            if part == PARTS - 1:
                done(free)
            activated = gate.to(gl.float32)
            if SILU:
                activated = activated * sigmoid(activated)
            row = first + part * PART
            store(h, row, column, I, M, activated * up.to(gl.float32))
            if gate_up is not None:
                store(gate_up, row, column, 2 * I, M, gate)
                store(gate_up, row, I + column, 2 * I, M, up)
        phase ^= 1


@gluon.jit
def gradients(gate_up, h, dgate_up, tiles_s, ready, free, tiles, M, I: gl.constexpr, SILU: gl.constexpr):
    """Store the gradients of gate and up and, if `h` is given, the gated product.

    Gate and up are read two parts ahead, across tiles: the latency of memory would otherwise take longer than the
    product of the next tile.
    """
    PARTS: gl.constexpr = 2 * WIDTH // PART
    tile = gl.program_id(0)
    first, column = tile // (I // WIDTH) * (2 * WIDTH), tile % (I // WIDTH) * WIDTH
    gate, up = load_factors(gate_up, first, column, M, I)
    gate1, up1 = load_factors(gate_up, first + PART, column, M, I)
    phase = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        first, column = tile // (I // WIDTH) * (2 * WIDTH), tile % (I // WIDTH) * WIDTH
        later = tile + gl.num_programs(0)
        later_first, later_column = later // (I // WIDTH) * (2 * WIDTH), later % (I // WIDTH) * WIDTH
        mbarrier.wait(ready, phase)
        for part in gl.static_range(PARTS):
            if part + 2 < PARTS:
                gate2, up2 = load_factors(gate_up, first + (part + 2) * PART, column, M, I)
            else:  # after the last tile, all rows are masked
                gate2, up2 = load_factors(gate_up, later_first + (part + 2 - PARTS) * PART, later_column, M, I)
            half = tiles_s.index(part // (PARTS // 2))
            d = half.slice((part % (PARTS // 2)) * PART, PART, 0).load(ROWS).to(gl.float32)
            if part == PARTS - 1:
                done(free)
            activated, factor = gate.to(gl.float32), up.to(gl.float32)
            dgate = d * factor
            if SILU:
                s = sigmoid(activated)
                dgate *= s * (1 + activated * (1 - s))
                activated = activated * s
            row = first + part * PART
            if h is not None:
                store(h, row, column, I, M, activated * factor)
            store(dgate_up, row, column, 2 * I, M, dgate)
            store(dgate_up, row, I + column, 2 * I, M, d * activated)
            gate, up, gate1, up1 = gate1, up1, gate2, up2
        phase ^= 1


@gluon.jit(do_not_specialize=["M"])
def gated_product(h, x, weight, gate_up, M, K: gl.constexpr, I: gl.constexpr, SILU: gl.constexpr):
    """Forward: x [M,K] and weight [2·I,K] are descriptors; h [M,I]; gate_up [M,2·I], or None."""
    tiles = gl.cdiv(M, WIDTH) * (I // WIDTH)
    a_s, b_s, tiles_s, full, empty, ready, free = buffers(True)
    gl.warp_specialize(
        [
            (products, (a_s, b_s, tiles_s, full, empty, ready, free, tiles, 0, K, True)),
            (products, (a_s, b_s, tiles_s, full, empty, ready, free, tiles, 1, K, True)),
            (results, (gate_up, h, tiles_s, ready, free, tiles, M, I, SILU)),
            (copies, (x, weight, a_s, b_s, full, empty, tiles, K, I, True)),
        ],
        [4, 4, 1],
        [168, 152, 24],
    )


@gluon.jit(do_not_specialize=["M"])
def gated_gradients(gate_up, dy, weight, h, dgate_up, M, K: gl.constexpr, I: gl.constexpr, SILU: gl.constexpr):
    """Backward: dy [M,K] and weight [K,I] are descriptors; gate_up and dgate_up [M,2·I]; h [M,I], or None."""
    tiles = gl.cdiv(M, 2 * WIDTH) * (I // WIDTH)
    a_s, b_s, tiles_s, full, empty, ready, free = buffers(False)
    gl.warp_specialize(
        [
            (products, (a_s, b_s, tiles_s, full, empty, ready, free, tiles, 0, K, False)),
            (products, (a_s, b_s, tiles_s, full, empty, ready, free, tiles, 1, K, False)),
            (gradients, (gate_up, h, dgate_up, tiles_s, ready, free, tiles, M, I, SILU)),
            (copies, (dy, weight, a_s, b_s, full, empty, tiles, K, I, False)),
        ],
        [4, 4, 1],
        [168, 152, 24],
    )


def _described(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A matrix that is copied in blocks of this size, to shared memory in the layout `SHARED`."""
    return TensorDescriptor.from_tensor(aligned(x.contiguous()), [rows, columns], SHARED_LAYOUT)


def fused_forward(x: Tensor, weight: Tensor, gate_up: Tensor | None, h: Tensor, silu: bool) -> None:
    """Compute gate and up of x [M,K] and a weight [2·I,K], and write the gated product to h [M,I].

    Gate and up are written to gate_up [M,2·I], if given.
    """
    (M, K), I = x.shape, h.shape[1]
    factors = (_described(each, select.WIDTH, select.INNER) for each in (x, weight))
    enqueue(gated_product, multiprocessors(h.device), h, *factors, gate_up, M, K=K, I=I, SILU=silu)


def fused_backward(gate_up: Tensor, dy: Tensor, weight: Tensor, h: Tensor | None, dgate_up: Tensor, silu: bool) -> None:
    """Compute dh, dy [M,K] times a weight [K,I], and write the gradients of gate and up to dgate_up [M,2·I].

    The gated product is written to h [M,I], if given.
    """
    (M, K), I = dy.shape, weight.shape[1]
    factors = _described(dy, select.WIDTH, select.INNER), _described(weight, select.INNER, select.WIDTH)
    programs = multiprocessors(gate_up.device)
    enqueue(gated_gradients, programs, gate_up, *factors, h, dgate_up, M, K=K, I=I, SILU=silu)
