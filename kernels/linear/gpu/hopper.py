"""Matrix products in Gluon whose order of sums does not depend on the number of rows (Hopper, bf16).

Groups of warps share the work as in `gpu/gluon_products.py`; `results` stores the tiles in bf16. A product with few
tiles, as the gradient of a weight is, may be divided along the sum: its parts are stored in fp32 by the groups that
compute them, and added in order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...core.allocation import new
from ...gpu.device import multiprocessors
from ...gpu.gluon_products import ROWS, SIDE, STEP, STRIP, WIDTH, described, fitting, place, product, turned
from ...gpu.gluon_tiles import at_tile, done
from ...gpu.launch import cdiv, enqueue

MOST_PARTS, LEAST_STEPS = 8, 16  # into which a sum is divided, and steps of a part
STORED = 12  # steps that take as long as storing a tile of a part and reading it again, by a bandwidth of 4 TB/s
BLOCK = 1024  # numbers of the result in a program that adds parts


@gluon.jit
def results(tiles_s, ready, free, tiles, outputs):
    """Store the tiles, unless the groups that compute them do."""
    y, M, across, down, y_row, N = outputs
    STRIPS: gl.constexpr = WIDTH // STRIP
    r = gl.expand_dims(gl.arange(0, STRIP, gl.SliceLayout(1, ROWS)), 1)
    c = gl.expand_dims(gl.arange(0, WIDTH, gl.SliceLayout(0, ROWS)), 0)
    phase = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        first, column, _ = place(tile, across, down)
        n = column * WIDTH
        mbarrier.wait(ready, phase)
        for strip in gl.static_range(2 * STRIPS):
            part = tiles_s.index(strip // STRIPS).slice(strip % STRIPS * STRIP, STRIP, 0).load(ROWS)
            if strip == 2 * STRIPS - 1:
                done(free)
            row = first * (2 * WIDTH) + strip * STRIP
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
    outputs, divided = (y, M, across, down, y_row, N), (y, M, N) if DIVIDED else None
    product(results, outputs, a, b, tiles, across, steps, A_TURNED, B_TURNED, 0, down, divided)


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


def multiply(a: Tensor, b: Tensor, y: Tensor, *, divide: bool) -> None:
    """Write a [M,K] times b [K,N] to y [M,N].

    Args:
        a: bf16, like all. K is a multiple of 8; with `divide`, M is, and a is stored by columns.
        b: N is a multiple of 8.
        y: By rows, which begin at multiples of 16 bytes.
        divide: Whether the sum may have a number of parts that depends on all sizes.
    """
    (M, K), N = a.shape, b.shape[1]
    programs, steps, tiles = multiprocessors(y.device), cdiv(K, STEP), cdiv(M, 2 * SIDE) * cdiv(N, SIDE)
    parts = parts_of(tiles, steps, programs) if divide else 1
    to = y if parts == 1 else new(y, parts, M, N, dtype=torch.float32)
    a, b = fitting(a, divide), fitting(b, not divide)
    factors = described(a, SIDE, STEP), described(b, STEP, SIDE)
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
