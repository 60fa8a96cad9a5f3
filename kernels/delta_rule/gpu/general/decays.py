"""Log decays of the tokens of a chunk per channel, in base 2, and the strengths of their writes."""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from ....gpu.tiles import CHUNK, LEAST, LOG2E
from ..steps import of_step


@triton.jit
def decays_of(log_decay, token, rows, valid, m, columns, M: tl.constexpr, K: tl.constexpr, STEPS: tl.constexpr):
    """The log2 decays [64,BK] of these rows of a chunk; 0 where a row is not valid or a later step of its token."""
    token, rows, valid = of_step(token, rows, valid, 0, STEPS)
    mask = valid[:, None] & (columns < K)[None, :]
    at = log_decay + (token.to(tl.int64) * M + m) * K + rows[:, None] * (M * K) + columns[None, :]
    return tl.maximum(tl.load(at, mask=mask, other=0.0).to(tl.float32) * LOG2E, LEAST)


@triton.jit
def strength_of(beta, token, valid, m, M: tl.constexpr):
    """β of the tokens of a chunk, or ones if the erase keys are given."""
    if beta is None:
        write = tl.full([CHUNK], 1.0, tl.float32)
    else:
        at = beta + token.to(tl.int64) * M + m + tl.arange(0, CHUNK) * M
        write = tl.load(at, mask=valid, other=0.0).to(tl.float32)
    return write
