"""Gates that a few numbers per token are widened into, and their decays, in one launch: raw gates stay in registers.

Forward, the decays are all that is written. Backward, their gradients are all that is read: a program computes the
raw gates of its columns again, tile by tile, and from their gradients its part of those of x, W and the bias.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.allocation import new
from ...core.autograd import Gradients, register
from ...gpu.launch import cdiv, enqueue, next_power_of_2
from ...gpu.overlap import MOST_EARLY, wait
from ...gpu.reductions import add_outer, add_parts
from ...gpu.rows import per_channel, rows_of, tile_of, walkers
from ...gpu.tiles import LOG2E, PTX, exp2, factor_dtype
from ..low_rank import composed, dtype_of
from .op import log_sigmoid

# Cap of log2 e^gate in the backward pass, where the derivative is 1e-18. The product of two e^gate does not overflow.
LARGEST = tl.constexpr(60.0)


class Walk(NamedTuple):
    """Launch configuration. Programs walk over the rows of a block of columns.

    Attributes:
        rows: Rows of a tile, a multiple of 16.
        columns: Columns of a tile.
        tiles: Adjacent tiles of a block of columns, which a program computes one after the other; forward 1.
        resident: Programs per multiprocessor.
    """

    rows: int
    columns: int
    tiles: int
    resident: int


FORWARD = Walk(rows=64, columns=64, tiles=1, resident=16)
# Backward by the size of a number of x, 2 or 4 bytes. With more tiles there are fewer parts of the gradients of x, but
# the sums for the gradients of W take more registers. Products in fp32 take the most.
BACKWARD_OF_HALF = Walk(rows=64, columns=64, tiles=2, resident=2)
BACKWARD_OF_FP32 = Walk(rows=32, columns=64, tiles=1, resident=2)
WIDEST = 64  # largest rank of the kernels; beyond it, a separate matrix product pays off


@triton.jit
def load_tile(x, first, rows, stride, c, C: tl.constexpr, ROWS: tl.constexpr):
    at, _, inside = tile_of(first, rows, stride, c, C, ROWS)
    return tl.load(x + at, mask=inside, other=0.0)


@triton.jit
def one_over_one_plus(x):
    """1 / (1 + x) in fp32, with one reciprocal for two elements, whose product must not overflow."""
    if PTX:
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 second, inverse;
            add.f32 second, $3, 0f3F800000;
            fma.rn.f32 inverse, $2, second, second;
            rcp.approx.ftz.f32 inverse, inverse;
            mul.f32 $0, inverse, second;
            fma.rn.f32 $1, inverse, $2, inverse;
            }""",
            "=&f,=&f,f,f",
            [x],
            tl.float32,
            True,
            2,
        )
    return 1 / (1 + x)


@triton.jit
def log_sigmoid_for_bf16(x):
    """Like `log_sigmoid`, to a relative error of 9e-6: far below the rounding to bf16, and two instructions shorter."""
    e = exp2(tl.abs(x) * -1.4426950408889634)
    p = e * -0.0238691214 + 0.10122221
    p = p * e - 0.210048631
    p = p * e + 0.325206667
    p = p * e - 0.499361366
    return tl.minimum(x, 0.0) - e * (p * e + 0.999991596)


@triton.jit(do_not_specialize=["rows"])
def low_rank_forward(
    x,  # [rows,R]
    weight,  # [C,R]
    bias,  # [C]
    log_decay,  # [rows,C]
    rows,
    x_row,
    scale,
    C: tl.constexpr,
    R: tl.constexpr,
    BR: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NEGATED: tl.constexpr,
    PRECISION: tl.constexpr,
    DTYPE: tl.constexpr,  # of factors of products
    OVERLAP: tl.constexpr,
):
    wait(OVERLAP)
    BLOCKS: tl.constexpr = (C + COLUMNS - 1) // COLUMNS
    BF16: tl.constexpr = log_decay.dtype.element_ty == tl.bfloat16
    column = tl.program_id(0) % BLOCKS * COLUMNS
    program, programs = tl.program_id(0) // BLOCKS, tl.num_programs(0) // BLOCKS
    row, c, r = tl.arange(0, ROWS)[:, None], column + tl.arange(0, COLUMNS), tl.arange(0, BR)
    W = load_tile(weight, column, C, R, r, R, COLUMNS).to(DTYPE)
    shift = per_channel(bias, c, C) if bias is not None else None
    for first in tl.range(program * ROWS, rows, programs * ROWS, num_stages=3):
        X = load_tile(x, first, rows, x_row, r, R, ROWS).to(DTYPE)
        wide = tl.dot(X, tl.trans(W), input_precision=PRECISION)
        if bias is not None:
            wide += shift
        if NEGATED:
            wide = -wide
        y = (log_sigmoid_for_bf16(wide) if BF16 else log_sigmoid(wide)) * scale
        inside = row < rows - first
        if C % COLUMNS != 0:
            inside = inside & (c < C)[None, :]
        at = log_decay + tl.cast(first, tl.int64) * C + (row * C + c[None, :])
        tl.store(at, y.to(log_decay.dtype.element_ty), mask=inside)


@triton.jit
def appended(items, item):
    return items + (item,)  # noqa: RUF005 (Triton does not unpack tuples)


@triton.jit
def add_tile(
    X,
    W,
    shift,
    dy,
    inside,
    from_x,
    from_weight,
    from_bias,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NEGATED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add a tile's unscaled gradients to those of x [ROWS,BR], W [BR,COLUMNS] and the bias [ROWS/16,8,COLUMNS]."""
    raw = tl.dot(X, tl.trans(W), input_precision=PRECISION) * LOG2E
    if shift is not None:
        raw += shift
    if NEGATED:  # of −x and of the bias negated: the sign of the gradients is in their scale
        raw = -raw
    d = tl.load(dy, mask=inside, other=0.0).to(tl.float32) * one_over_one_plus(
        exp2(tl.minimum(raw, LARGEST, propagate_nan=tl.PropagateNan.ALL))
    )
    # Rows 8 apart belong to the same thread, so that these sums need no exchange between threads.
    from_bias += tl.sum(tl.reshape(d, [ROWS // 16, 2, 8, COLUMNS]), 1)
    D = d.to(X.dtype)
    from_weight = tl.dot(tl.trans(X), D, from_weight, input_precision=PRECISION)
    return tl.dot(D, W, from_x, input_precision=PRECISION), from_weight, from_bias


@triton.jit(do_not_specialize=["rows"])
def low_rank_backward(
    x,
    weight,
    bias,
    dy,  # [rows,C]
    x_parts,  # [blocks of columns,rows,R], to be summed over the blocks
    weight_parts,  # [programs per block,R,C], to be summed over the programs
    bias_parts,  # [programs per block,1,C], likewise
    rows,
    x_row,
    scale,
    C: tl.constexpr,
    R: tl.constexpr,
    BR: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
    NEGATED: tl.constexpr,
    PRECISION: tl.constexpr,
    DTYPE: tl.constexpr,  # of factors of products
):
    BLOCK: tl.constexpr = COLUMNS * TILES
    BLOCKS: tl.constexpr = (C + BLOCK - 1) // BLOCK
    block = tl.program_id(0) % BLOCKS
    program, programs = tl.program_id(0) // BLOCKS, tl.num_programs(0) // BLOCKS
    row, c, r = tl.arange(0, ROWS)[:, None], block * BLOCK + tl.arange(0, COLUMNS), tl.arange(0, BR)
    weights, shifts, sums = (), (), ()
    for i in tl.static_range(TILES):
        W = load_tile(weight, block * BLOCK + i * COLUMNS, C, R, r, R, COLUMNS).to(DTYPE)
        weights = appended(weights, W)
        if bias is not None:
            shifts = appended(shifts, per_channel(bias, c + i * COLUMNS, C) * LOG2E)
        from_weight = tl.zeros([BR, COLUMNS], tl.float32)
        sums = appended(sums, (from_weight, tl.zeros([ROWS // 16, 8, COLUMNS], tl.float32)))
    for first in tl.range(program * ROWS, rows, programs * ROWS, num_stages=3):
        X = load_tile(x, first, rows, x_row, r, R, ROWS).to(DTYPE)
        at = dy + tl.cast(first, tl.int64) * C + (row * C + c[None, :])
        from_x, new_sums = tl.zeros([ROWS, BR], tl.float32), ()
        for i in tl.static_range(TILES):
            inside = row < rows - first
            if C % BLOCK != 0:
                inside = inside & (c + i * COLUMNS < C)[None, :]
            shift = shifts[i] if bias is not None else None
            from_x, from_weight, from_bias = add_tile(
                X,
                weights[i],
                shift,
                at + i * COLUMNS,
                inside,
                from_x,
                sums[i][0],
                sums[i][1],
                ROWS,
                COLUMNS,
                NEGATED,
                PRECISION,
            )
            new_sums = appended(new_sums, (from_weight, from_bias))
        sums = new_sums
        into, _, inside = tile_of(first, rows, R, r, R, ROWS)
        tl.store(x_parts + block.to(tl.int64) * rows * R + into, from_x * scale, mask=inside)
    for i in tl.static_range(TILES):
        at = c + i * COLUMNS
        mask = (r < R)[:, None] & (at < C)[None, :]
        tl.store(weight_parts + (program * R + r[:, None]) * C + at[None, :], sums[i][0] * scale, mask=mask)
        if bias_parts is not None:
            tl.store(bias_parts + program * C + at, tl.sum(tl.sum(sums[i][1], 0), 0) * scale, mask=at < C)


def _constants(x: Tensor, weight: Tensor) -> dict[str, Any]:
    C, R = weight.shape
    dtype = factor_dtype(x.dtype)
    sizes = {"C": C, "R": R, "BR": max(16, next_power_of_2(R))}
    return sizes | {"PRECISION": "ieee" if dtype == tl.float32 else "tf32", "DTYPE": dtype}


class Arguments(NamedTuple):
    x: Tensor  # […,R]
    weight: Tensor  # [C,R]
    bias: Tensor | None  # [C]
    scale: float
    negated: bool


def _empty(args: Arguments) -> tuple[Tensor]:
    return (new(args.x, *args.x.shape[:-1], args.weight.shape[0], dtype=dtype_of(args.x)),)


def _compute(args: Arguments) -> tuple[Tensor]:
    (x, weight, bias, scale, negated), (y,) = args, _empty(args)
    x, rows, x_row = rows_of(x)
    constants = _constants(x, weight) | {"ROWS": FORWARD.rows, "COLUMNS": FORWARD.columns, "NEGATED": negated}
    blocks = cdiv(constants["C"], FORWARD.columns)
    programs = walkers(rows, FORWARD.rows, x.device, FORWARD.resident, blocks) * blocks
    constants |= {"warps": 4, "overlap": programs <= MOST_EARLY}
    enqueue(low_rank_forward, programs, x, weight, bias, y, rows, x_row, scale, **constants)
    return (y,)


def _differentiate(args: Arguments, needed: Any, dy: Tensor) -> Gradients:
    x, weight, bias, scale, negated = args
    shape, (C, R) = x.shape, weight.shape
    x, rows, x_row = rows_of(x)
    constants, walk = _constants(x, weight), BACKWARD_OF_HALF if x.element_size() == 2 else BACKWARD_OF_FP32
    blocks = cdiv(C, walk.columns * walk.tiles)
    programs = walkers(rows, walk.rows, x.device, walk.resident, blocks)
    of_x, of_weight = (new(x, *sizes, dtype=torch.float32) for sizes in ((blocks, rows, R), (programs, R, C)))
    of_bias = None if bias is None else new(x, programs, 1, C, dtype=torch.float32)
    tensors = (x, weight, bias, dy.contiguous(), of_x, of_weight, of_bias)
    tile = {"ROWS": walk.rows, "COLUMNS": walk.columns, "TILES": walk.tiles, "NEGATED": negated}
    scale = -scale if negated else scale
    enqueue(low_rank_backward, programs * blocks, *tensors, rows, x_row, scale, **constants, **tile, warps=4)
    dbias = None if of_bias is None or bias is None else add_parts(of_bias, bias.dtype).view(C)
    dx = add_outer(of_x, x.dtype).view(shape)
    return {"x": dx, "weight": add_parts(of_weight, weight.dtype), "bias": dbias}


low_rank = register("low_rank_forget_gate", _compute, _differentiate, _empty)


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, scale: float, negated: bool) -> Tensor:
    """log_decay [B,T,C] of x [B,T,R]."""
    if x.shape[2] > WIDEST:
        return composed(x, weight, bias, scale, negated)
    bias = None if bias is None else bias.contiguous()
    return low_rank(x, weight.contiguous(), bias, scale, negated)
