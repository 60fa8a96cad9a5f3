"""Fused kernels of a gated MLP in Gluon: a matrix product and the gate, forward and backward (Hopper, bf16).

    forward     gate, up = x W_gateᵀ, x W_upᵀ      h = activation(gate) ⊙ up
    backward    dh = dy W_down      dgate = dh ⊙ up ⊙ activation'(gate)      dup = dh ⊙ activation(gate)

The backward pass also recomputes h, unless it was kept. Each product is rounded to bf16, as in memory.

Groups of warps share the work as in `gpu/gluon_products.py`, so that the elementwise part of a tile overlaps with the
product of the next one. A tile is 128 columns of gate and the same columns of up, or 256 rows and 128 columns of dh:

    results     activation(gate) ⊙ up; store gate, up and h (forward)
    gradients   read gate and up ahead of dh; store their gradients and h (backward)
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...gpu.device import multiprocessors
from ...gpu.gluon_products import INNER, ROWS, SIDE, STEP, STRIP, WIDTH, described, fitting, product
from ...gpu.gluon_tiles import at_tile, done
from ...gpu.launch import enqueue


@gluon.jit
def addresses(x, row, column, stride: gl.constexpr, M):
    """Return the addresses of a part of a tile, and the mask of its rows."""
    r = gl.expand_dims(gl.arange(0, STRIP, gl.SliceLayout(1, ROWS)), 1)
    # `r < M - row` would spill registers
    return at_tile(x, row, column, stride, ROWS, STRIP, WIDTH), row + r < M


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
def results(tiles_s, ready, free, tiles, outputs):
    """Store the gated product and, if `gate_up` is given, gate and up."""
    gate_up, h, M, I, SILU = outputs
    STRIPS: gl.constexpr = WIDTH // STRIP
    phase = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        first, column = tile // (I // WIDTH) * WIDTH, tile % (I // WIDTH) * WIDTH
        mbarrier.wait(ready, phase)
        for strip in gl.static_range(STRIPS):
            gate = tiles_s.index(0).slice(strip * STRIP, STRIP, 0).load(ROWS)
            up = tiles_s.index(1).slice(strip * STRIP, STRIP, 0).load(ROWS)
            if strip == STRIPS - 1:
                done(free)
            activated = gate.to(gl.float32)
            if SILU:
                activated = activated * sigmoid(activated)
            row = first + strip * STRIP
            store(h, row, column, I, M, activated * up.to(gl.float32))
            if gate_up is not None:
                store(gate_up, row, column, 2 * I, M, gate)
                store(gate_up, row, I + column, 2 * I, M, up)
        phase ^= 1


@gluon.jit
def gradients(tiles_s, ready, free, tiles, outputs):
    """Store the gradients of gate and up and, if `h` is given, the gated product.

    Gate and up are read two parts ahead, across tiles: the latency of memory would otherwise take longer than the
    product of the next tile.
    """
    gate_up, h, dgate_up, M, I, SILU = outputs
    STRIPS: gl.constexpr = 2 * WIDTH // STRIP
    tile = gl.program_id(0)
    first, column = tile // (I // WIDTH) * (2 * WIDTH), tile % (I // WIDTH) * WIDTH
    gate, up = load_factors(gate_up, first, column, M, I)
    gate1, up1 = load_factors(gate_up, first + STRIP, column, M, I)
    phase = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        first, column = tile // (I // WIDTH) * (2 * WIDTH), tile % (I // WIDTH) * WIDTH
        later = tile + gl.num_programs(0)
        later_first, later_column = later // (I // WIDTH) * (2 * WIDTH), later % (I // WIDTH) * WIDTH
        mbarrier.wait(ready, phase)
        for strip in gl.static_range(STRIPS):
            if strip + 2 < STRIPS:
                gate2, up2 = load_factors(gate_up, first + (strip + 2) * STRIP, column, M, I)
            else:  # after the last tile, all rows are masked
                gate2, up2 = load_factors(gate_up, later_first + (strip + 2 - STRIPS) * STRIP, later_column, M, I)
            half = tiles_s.index(strip // (STRIPS // 2))
            d = half.slice((strip % (STRIPS // 2)) * STRIP, STRIP, 0).load(ROWS).to(gl.float32)
            if strip == STRIPS - 1:
                done(free)
            activated, factor = gate.to(gl.float32), up.to(gl.float32)
            dgate = d * factor
            if SILU:
                s = sigmoid(activated)
                dgate *= s * (1 + activated * (1 - s))
                activated = activated * s
            row = first + strip * STRIP
            if h is not None:
                store(h, row, column, I, M, activated * factor)
            store(dgate_up, row, column, 2 * I, M, dgate)
            store(dgate_up, row, I + column, 2 * I, M, d * activated)
            gate, up, gate1, up1 = gate1, up1, gate2, up2
        phase ^= 1


@gluon.jit(do_not_specialize=["M"])
def gated_product(h, x, weight, gate_up, M, K: gl.constexpr, I: gl.constexpr, SILU: gl.constexpr):
    """Forward: x [M,K] and weight [2·I,K] are descriptors; h [M,I]; gate_up [M,2·I], or None."""
    across: gl.constexpr = I // WIDTH
    tiles, steps = gl.cdiv(M, WIDTH) * across, gl.cdiv(K, INNER)
    product(results, (gate_up, h, M, I, SILU), x, weight, tiles, across, steps, False, True, I)


@gluon.jit(do_not_specialize=["M"])
def gated_gradients(gate_up, dy, weight, h, dgate_up, M, K: gl.constexpr, I: gl.constexpr, SILU: gl.constexpr):
    """Backward: dy [M,K] and weight [K,I] are descriptors; gate_up and dgate_up [M,2·I]; h [M,I], or None."""
    across: gl.constexpr = I // WIDTH
    tiles, steps = gl.cdiv(M, 2 * WIDTH) * across, gl.cdiv(K, INNER)
    product(gradients, (gate_up, h, dgate_up, M, I, SILU), dy, weight, tiles, across, steps, False, False)


def fused_forward(x: Tensor, weight: Tensor, gate_up: Tensor | None, h: Tensor, silu: bool) -> None:
    """Compute gate and up of x [M,K] and a weight [2·I,K], and write the gated product to h [M,I].

    Gate and up are written to gate_up [M,2·I], if given.
    """
    (M, K), I = x.shape, h.shape[1]
    factors = (described(fitting(each, False), SIDE, STEP) for each in (x, weight))
    enqueue(gated_product, multiprocessors(h.device), h, *factors, gate_up, M, K=K, I=I, SILU=silu)


def fused_backward(gate_up: Tensor, dy: Tensor, weight: Tensor, h: Tensor | None, dgate_up: Tensor, silu: bool) -> None:
    """Compute dh, dy [M,K] times a weight [K,I], and write the gradients of gate and up to dgate_up [M,2·I].

    The gated product is written to h [M,I], if given.
    """
    (M, K), I = dy.shape, weight.shape[1]
    factors = described(fitting(dy, False), SIDE, STEP), described(fitting(weight, False), STEP, SIDE)
    programs = multiprocessors(gate_up.device)
    enqueue(gated_gradients, programs, gate_up, *factors, h, dgate_up, M, K=K, I=I, SILU=silu)
