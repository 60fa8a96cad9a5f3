"""Tiles of tensors with one row per token, in chunks of rows that are steps of tokens.

Row r of the time axis is step r mod n of token r // n. Queries and outputs belong to the last step of a token, and log
decays to the first. The other rows of a tile are zeros when it is loaded, and are left out when it is stored.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from ...gpu.tiles import CHUNK, load_tokens, store_tokens


@triton.jit
def of_step(start, rows, valid, STEP: tl.constexpr, STEPS: tl.constexpr):
    """First token of a chunk, the tokens of its rows from there on, and which rows are this step of a token."""
    if STEPS == 1:
        return start, rows, valid
    token = start // STEPS
    return token, (start + rows) // STEPS - token, valid & ((start + rows) % STEPS == STEP)


@triton.jit
def load_last(
    x, start, stop, stride, column, WIDTH: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr, STEPS: tl.constexpr
):
    """Load a tile as `load_tokens` does, for the rows from `start` on, from a tensor that has only the last steps."""
    if STEPS == 1:
        return load_tokens(x, start, stop, stride, column, WIDTH, BLOCK, DTYPE)
    at, mask = last_at(x, start, stop, stride, column, WIDTH, BLOCK, STEPS)
    return tl.load(at, mask=mask, other=0.0).to(DTYPE)


@triton.jit
def store_last(x, start, stop, stride, column, WIDTH: tl.constexpr, BLOCK: tl.constexpr, value, STEPS: tl.constexpr):
    """Store the last steps of a tile of rows."""
    if STEPS == 1:
        store_tokens(x, start, stop, stride, column, WIDTH, BLOCK, value)
    else:
        at, mask = last_at(x, start, stop, stride, column, WIDTH, BLOCK, STEPS)
        tl.store(at, value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def last_at(x, start, stop, stride, column, WIDTH: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """Pointers and mask of the last steps."""
    r, c = tl.arange(0, CHUNK), column + tl.arange(0, BLOCK)
    token, r, valid = of_step(start, r, r < stop - start, STEPS - 1, STEPS)
    mask = valid[:, None]
    if WIDTH % BLOCK != 0:
        mask = mask & (c < WIDTH)[None, :]
    return x + token.to(tl.int64) * stride + (r[:, None] * stride + c[None, :]), mask
