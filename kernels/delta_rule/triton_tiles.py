"""What the kernels of the (gated) delta rule share: tiles of tokens and states, and the decay inside a chunk.

Time is cut into chunks of 64 tokens. Pairs of tokens see their decay as a sum of two fp32 numbers,
so that the difference of two sums of thousands keeps its digits, and never as the exponential of a positive number.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from ..triton.tiles import CHUNK, exp2


@triton.jit
def tokens_at(x, token, stop, stride, column, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Pointers and mask of the tile [64, BLOCK] that starts at a token and a column."""
    r, c = tl.arange(0, CHUNK), column + tl.arange(0, BLOCK)
    mask = (r < stop - token)[:, None]
    if WIDTH % BLOCK != 0:
        mask = mask & (c < WIDTH)[None, :]
    return x + token.to(tl.int64) * stride + (r[:, None] * stride + c[None, :]), mask


@triton.jit
def load_tokens(x, token, stop, stride, column, WIDTH: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
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
    """A tile [64, 64] of numbers for pairs of tokens."""
    r = tl.arange(0, CHUNK)
    return tl.load(x + r[:, None] * CHUNK + r[None, :]).to(DTYPE)


@triton.jit
def store_pairs(x, value):
    r = tl.arange(0, CHUNK)
    tl.store(x + r[:, None] * CHUNK + r[None, :], value.to(x.dtype.element_ty))


@triton.jit
def pair_decay(high, low):
    """exp of minus the decay between two tokens of a chunk, symmetric [64, 64]; high + low [64] is the summed log2."""
    difference = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    return exp2(-tl.abs(difference))
