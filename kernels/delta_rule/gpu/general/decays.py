"""Log decays of the tokens of a chunk per channel, in base 2, and powers of two.

The ways to compute pairs of tokens are those of `linear_recurrence/gpu/vector_decay.py`, which explains them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from ....gpu.tiles import CHUNK, LEAST, LOG2E, exp2
from ..steps import of_step


@triton.jit
def decays_of(log_decay, token, rows, valid, m, columns, M: tl.constexpr, K: tl.constexpr, STEPS: tl.constexpr):
    """The log2 decays [64,BK] of these rows of a chunk; 0 where a row is not valid or a later step of its token."""
    token, rows, valid = of_step(token, rows, valid, 0, STEPS)
    mask = valid[:, None] & (columns < K)[None, :]
    at = log_decay + (token.to(tl.int64) * M + m) * K + rows[:, None] * (M * K) + columns[None, :]
    return tl.maximum(tl.load(at, mask=mask, other=0.0).to(tl.float32) * LOG2E, LEAST)


@triton.jit
def split(b):
    """2^part, 2^−part and whole for b = part + whole, where whole is a whole number and part in [0, 1)."""
    whole = tl.floor(b)
    part = (b - whole).to(tl.float32)
    return exp2(part), exp2(-part), whole.to(tl.int32)


@triton.jit
def power(n):
    """2^n in fp32 for whole numbers n, from the bits of its exponent; 0 below 2^−126."""
    return ((tl.minimum(tl.maximum(n, -127), 127) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def strength_of(beta, token, valid, m, M: tl.constexpr):
    """β of the tokens of a chunk, or ones if the erase keys are given."""
    if beta is None:
        write = tl.full([CHUNK], 1.0, tl.float32)
    else:
        at = beta + token.to(tl.int64) * M + m + tl.arange(0, CHUNK) * M
        write = tl.load(at, mask=valid, other=0.0).to(tl.float32)
    return write
