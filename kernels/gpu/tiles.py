"""Building blocks of kernels: tiles of memory, entries of a layout's tables, powers of two and the logistic function.

Triton's own exponentials handle results and divisors that are too small for the exponent of fp32, at two or three more
instructions each. Here such results are zeros. That pays off where memory is not the only thing that a kernel waits
for.
"""

# Triton kernels: untyped, with branches that are resolved at compile time
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

from . import layout

INTERPRETED = triton.knobs.runtime.interpret
CHUNK = tl.constexpr(layout.CHUNK)
LOG2E = tl.constexpr(1.4426950408889634)
# Smallest log2 decay of a step, which −inf counts as: 2^-152 is 0 in fp32 even after the rounding of a sum of 64 such
# exponents, which still has digits left for its differences.
LEAST = tl.constexpr(-152.0)
# other devices, and the interpreter, lack these instructions
PTX: tl.constexpr = tl.constexpr(torch.version.hip is None and not INTERPRETED)


def factor_dtype(dtype: torch.dtype) -> tl.dtype:
    """The dtype in which a product multiplies factors of a dtype: fp32 in the interpreter, which gets bf16 wrong."""
    if dtype == torch.float32 or INTERPRETED:
        return tl.float32
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float16


@triton.jit
def exp2(x):
    """2^x in fp32, accurate to the last bit or two."""
    if PTX:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return tl.exp2(x)


@triton.jit
def sigmoid(x):
    """1 / (1 + e^−x) in fp32; as in Triton's version, the product with log2 e loses bits for large x."""
    if PTX:
        divisor = 1 + exp2(x * -1.4426950408889634)
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [divisor], tl.float32, True, 1)
    return tl.sigmoid(x)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """The activation of x in fp32 (sigmoid, silu, relu2 or identity), and its slope."""
    if ACTIVATION == "identity":
        return x, tl.full(x.shape, 1.0, tl.float32)
    if ACTIVATION == "relu2":
        r = tl.where(x < 0, 0.0, x)  # NaN stays
        return r * r, 2 * r
    s = sigmoid(x)
    if ACTIVATION == "silu":
        return x * s, s * (1 + x * (1 - s))
    return s, s * (1 - s)


@triton.jit
def log1p_exp(x):
    """log(1 + e) with e = e^−|x|, to a relative error of 3e-7, however small.

    It is a polynomial, fitted to log(1 + e) / e over [0, 1]: a logarithm takes longer, and of 1 + e has few digits.
    """
    e = exp2(tl.abs(x) * -1.4426950408889634)
    p = e * -0.00853890358 + 0.0440885619
    p = p * e - 0.107680238
    p = p * e + 0.177451405
    p = p * e - 0.244954274
    p = p * e + 0.332754738
    p = p * e - 0.49997405
    return e * (p * e + 0.999999806)


@triton.jit
def pair_of(each):
    """Two indices from that of the program, the first of which is below `each`: a second axis would end at 65,535."""
    return tl.program_id(0) % each, tl.program_id(0) // each


@triton.jit
def load_tile(pointer, rows, stride, columns, valid, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """[rows, columns] of a matrix whose last axis is contiguous; zeros where a row is not valid or beyond WIDTH."""
    mask = valid[:, None]
    if WIDTH % BLOCK != 0:
        mask = mask & (columns < WIDTH)[None, :]
    return tl.load(pointer + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(pointer, rows, stride, columns, valid, x, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    mask = valid[:, None]
    if WIDTH % BLOCK != 0:
        mask = mask & (columns < WIDTH)[None, :]
    tl.store(pointer + rows[:, None] * stride + columns[None, :], x.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def chunk_at(chunks, chunk):
    """First token of a chunk of a layout, and one past its last."""
    start = tl.load(chunks + chunk * 2)
    return start, start + tl.load(chunks + chunk * 2 + 1)


@triton.jit
def segment_at(segments, segment):
    """First token of a segment of a layout, one past its last, and its first chunk."""
    start = tl.load(segments + segment * 5)
    return start, start + tl.load(segments + segment * 5 + 1), tl.load(segments + segment * 5 + 2)


@triton.jit
def of_program(segments, M: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr):
    """The work of a program of a pass along time: a block of values of one of M recurrences, in a segment.

    Returns the first value, the recurrence among those of all segments, the recurrence, and what `segment_at` returns.
    """
    BLOCKS: tl.constexpr = (V + BLOCK - 1) // BLOCK
    column = (tl.program_id(0) % BLOCKS) * BLOCK
    recurrence = tl.program_id(0) // BLOCKS
    n, m = recurrence // M, recurrence % M
    start, stop, first = segment_at(segments, n)
    return column, recurrence, m, start, stop, first


@triton.jit
def tokens_at(x, token, stop, stride, column, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Pointers and mask of the tile [64, BLOCK] that starts at a token and a column.

    Like `load_tile`, but offsets are added up first, which saves instructions in the backward pass of the delta rule.
    """
    r, c = tl.arange(0, CHUNK), column + tl.arange(0, BLOCK)
    mask = (r < stop - token)[:, None]
    if WIDTH % BLOCK != 0:
        mask = mask & (c < WIDTH)[None, :]
    return x + token.to(tl.int64) * stride + (r[:, None] * stride + c[None, :]), mask


@triton.jit
def load_tokens(x, token, stop, stride, column, WIDTH: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """The tile, with zeros from token `stop` on and beyond WIDTH."""
    at, mask = tokens_at(x, token, stop, stride, column, WIDTH, BLOCK)
    return tl.load(at, mask=mask, other=0.0).to(DTYPE)


@triton.jit
def store_tokens(x, token, stop, stride, column, WIDTH: tl.constexpr, BLOCK: tl.constexpr, value):
    at, mask = tokens_at(x, token, stop, stride, column, WIDTH, BLOCK)
    tl.store(at, value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def load_state(
    x, row, column, K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DTYPE: tl.constexpr
):
    """The tile [ROWS, COLUMNS] of a state [K, V]."""
    r, c = (row + tl.arange(0, ROWS))[:, None], (column + tl.arange(0, COLUMNS))[None, :]
    if K % ROWS == 0 and V % COLUMNS == 0:
        return tl.load(x + r * V + c).to(DTYPE)
    return tl.load(x + r * V + c, mask=(r < K) & (c < V), other=0.0).to(DTYPE)


@triton.jit
def store_state(x, row, column, K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, value):
    r, c = (row + tl.arange(0, ROWS))[:, None], (column + tl.arange(0, COLUMNS))[None, :]
    if K % ROWS == 0 and V % COLUMNS == 0:
        tl.store(x + r * V + c, value.to(x.dtype.element_ty))
    else:
        tl.store(x + r * V + c, value.to(x.dtype.element_ty), mask=(r < K) & (c < V))


@triton.jit
def load_pairs(x, DTYPE: tl.constexpr):
    """A tile [64, 64] of values for pairs of tokens."""
    r = tl.arange(0, CHUNK)
    return tl.load(x + r[:, None] * CHUNK + r[None, :]).to(DTYPE)


@triton.jit
def store_pairs(x, value):
    r = tl.arange(0, CHUNK)
    tl.store(x + r[:, None] * CHUNK + r[None, :], value.to(x.dtype.element_ty))
