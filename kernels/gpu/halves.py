"""Decays per channel between the tokens of a chunk, by halves: exact for any decay, in the same time.

The decay from token j to a later token i, e^{b_i − b_j}, is a product of a factor of i and a factor of j for each
reference point between them. A chunk is halved until single tokens are left. Each pair of tokens is separated at one
level, where i is in the second half of a block and j in the first, and the reference point is the boundary between the
halves. The factor of a token is the decay between it and the boundary, so no exponent is positive: there is no overflow,
and a strong decay, even a reset, makes its factor zero and changes no other. Sums of decays start at the boundary and
therefore keep the digits of gentle decays after strong ones. No factor depends on later tokens.

Level n halves blocks of 64, 32, … 2 tokens for n = 0 … 5. The pairs of a token with itself do not decay.
"""

# Triton kernels: untyped, with branches that are resolved at compile time
# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from .tiles import CHUNK

LEVELS = tl.constexpr(6)


@triton.jit
def places():
    """Row and column numbers of a tile [64, 64]."""
    r = tl.arange(0, CHUNK)
    return r[:, None], r[None, :]


@triton.jit
def is_second(LEVEL: tl.constexpr):
    """Which tokens [64] are in the second half of a block."""
    return (tl.arange(0, CHUNK) // (CHUNK >> LEVEL + 1)) % 2 == 1


@triton.jit
def separated(LEVEL: tl.constexpr):
    """Which pairs of tokens [64, 64] are in different halves of one block; symmetric."""
    i, j = places()
    return (i ^ j) // (CHUNK >> LEVEL + 1) == 1


@triton.jit
def to_boundary(LEVEL: tl.constexpr, BEFORE: tl.constexpr):
    """Ones [64, 64] for the tokens whose decays lie between a token (row) and the boundary in its block.

    Args:
        LEVEL: The level.
        BEFORE: Whether tokens of second halves read before their own decay.
    """
    i, t = places()
    HALF: tl.constexpr = CHUNK >> LEVEL + 1
    past = (t < i) if BEFORE else (t <= i)
    return (i // HALF == t // HALF) & tl.where((i // HALF) % 2 == 1, past, t > i)


@triton.jit
def sums_of(which, g, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """Sums [64, BK] of the decays g [64, BK] of tokens, for a matrix of ones `which`; bf16 is used in two parts."""
    if DOT == tl.float32:
        return tl.dot(which.to(tl.float32), g, input_precision="ieee" if PRECISION == "ieee" else "tf32x3")
    ones, high = which.to(DOT), g.to(DOT)
    low = (g - high.to(tl.float32)).to(DOT)
    return tl.dot(ones, high, tl.dot(ones, low))


@triton.jit
def load_symmetric(x):
    """X + Xᵀ for a strictly lower tile X [64, 64] in memory; a transposed operand of a product has to be loaded."""
    i, j = places()
    return tl.load(x + i * CHUNK + j).to(tl.float32) + tl.load(x + j * CHUNK + i).to(tl.float32)
