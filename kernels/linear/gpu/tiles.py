"""Matrix products whose tiles, and whose order of sums, do not depend on the number of rows."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...gpu.device import runs_gluon
from ...gpu.launch import cdiv, enqueue
from ...gpu.paths import KernelPath, takes
from ...gpu.tiles import INTERPRETED, factor_dtype

UNIT = 8  # numbers in 16 bytes
GROUP = 8  # rows of tiles that are computed together, whose tiles of b then are in L2


class Tile(NamedTuple):
    """A tile of the result, and the steps along the inner axis in which it is computed."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


TILES = {2: Tile(128, 128, 64, 8, 3), 4: Tile(64, 64, 32, 4, 3)}  # by bytes per element


@triton.jit
def at(row, row_stride, column, column_stride):
    return row[:, None].to(tl.int64) * row_stride + column[None, :].to(tl.int64) * column_stride


@triton.jit(do_not_specialize=["M"])
def multiply_tiles(
    a,  # [H,M,K]
    b,  # [H,K,N]
    y,  # [H,M,N]
    M,
    N,
    K,
    a_head,
    a_row,
    a_inner,
    b_head,
    b_inner,
    b_column,
    y_head,
    y_row,
    y_column,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of the result per program; the loop over the inner axis has the same steps for all of them."""
    down, across = tl.cdiv(M, ROWS), tl.cdiv(N, COLUMNS)
    head, tile = tl.program_id(0) // (down * across), tl.program_id(0) % (down * across)
    first = tile // (GROUP * across) * GROUP
    grouped = min(down - first, GROUP)
    within = tile % (GROUP * across)
    m = (first + within % grouped) * ROWS + tl.arange(0, ROWS)
    n = within // grouped * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, INNER)
    a += head.to(tl.int64) * a_head + at(m, a_row, k, a_inner)
    b += head.to(tl.int64) * b_head + at(k, b_inner, n, b_column)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, K, INNER):
        inside = start + k < K
        left = tl.load(a, mask=(m < M)[:, None] & inside[None, :], other=0.0).to(DTYPE)
        right = tl.load(b, mask=inside[:, None] & (n < N)[None, :], other=0.0).to(DTYPE)
        sums = tl.dot(left, right, sums, input_precision=PRECISION)
        a += INNER * a_inner
        b += INNER * b_inner
    y += head.to(tl.int64) * y_head + at(m, y_row, n, y_column)
    tl.store(y, sums.to(y.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


class Product(NamedTuple):
    """The quantities that the choice depends on: of one row as of many."""

    a: Tensor
    b: Tensor
    y: Tensor
    divide: bool

    @property
    def fits(self) -> bool:
        """Return whether the kernel in Gluon is made for the sizes, after copies where tensors are stored otherwise."""
        (H, M, K), N = self.a.shape, self.b.shape[2]
        rows = M if self.divide else K  # of a, which is stored by columns where the sum is over tokens
        sizes = H == 1 and min(M, K, N) > 0 and rows % UNIT == 0 and N % UNIT == 0
        y = self.y.stride(2) == 1 and self.y.stride(1) % UNIT == 0
        return sizes and y and {x.dtype for x in self[:3]} == {torch.bfloat16}


HOPPER = KernelPath(
    "hopper_tiles",
    when=lambda case: runs_gluon(case.a.device) and case.fits,
    why="bf16 on Hopper, sizes that are multiples of 8: a kernel in Gluon computes the tiles",
)


def multiply(a: Tensor, b: Tensor, y: Tensor, *, divide: bool) -> None:
    """Write a [H,M,K] times b [H,K,N] to y [H,M,N].

    With `divide` the sum may be divided, in parts whose number depends on all sizes: for gradients of weights, whose
    result is not that of one row.
    """
    if takes(HOPPER, Product(a, b, y, divide)):
        from . import hopper  # other GPUs do without Gluon

        hopper.multiply(a[0], b[0], y[0], divide=divide)
        return
    (H, M, K), N, tile = a.shape, b.shape[2], TILES[a.itemsize]
    exact = a.dtype == torch.float32
    fast = torch.backends.cuda.matmul.allow_tf32 and a.is_cuda
    precision = "ieee" if INTERPRETED or not exact else "tf32" if fast else "tf32x3"
    constants = {"ROWS": tile.rows, "COLUMNS": tile.columns, "INNER": tile.inner, "GROUP": GROUP}
    enqueue(
        multiply_tiles,
        H * cdiv(M, tile.rows) * cdiv(N, tile.columns),
        *(a, b, y, M, N, K, *a.stride(), *b.stride(), *y.stride()),
        **constants,
        DTYPE=factor_dtype(a.dtype),
        PRECISION=precision,
        warps=tile.warps,
        stages=tile.stages,
    )
