"""Decays per channel between the tokens of a chunk, by halves: exact for any decay, in the same time.

The decay from token j to a later token i, e^{b_i − b_j}, is a product of a factor of i and a factor of j for each
reference point between them. A chunk is halved until single tokens are left. Each pair of tokens is separated at one
level, where i is in the second half of a block and j in the first, and the reference point is the boundary between the
halves. The factor of a token is the decay between it and the boundary, so no exponent is positive. Therefore nothing
overflows, and a strong decay, even a reset, makes its factor zero and changes no other. No factor of i depends on later
tokens.

Level n halves blocks of 64, 32, … 2 tokens for n = 0 … 5. The pairs of a token with itself do not decay.
"""

# Triton kernels: untyped, with branches that are resolved at compile time
# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from .tiles import CHUNK, exp2, load_pairs, load_tile, store_tile

LEVELS = tl.constexpr(6)


@triton.jit
def places():
    """Row and column numbers of a tile [64, 64]."""
    r = tl.arange(0, CHUNK)
    return r[:, None], r[None, :]


@triton.jit
def is_second(LEVEL: tl.constexpr):
    """Return which tokens [64] are in the second half of a block."""
    return (tl.arange(0, CHUNK) // (CHUNK >> LEVEL + 1)) % 2 == 1


@triton.jit
def separated(LEVEL: tl.constexpr):
    """Return which pairs of tokens [64, 64] are in different halves of one block; symmetric."""
    i, j = places()
    return (i ^ j) // (CHUNK >> LEVEL + 1) == 1


@triton.jit
def share_sums(sums, b, stride, columns, valid, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Store the sums b of decays in memory, from where `factor_at` of this program reads the rows of boundaries."""
    store_tile(sums, tl.arange(0, CHUNK), stride, columns, valid, b, WIDTH, BLOCK)
    tl.debug_barrier()


@triton.jit
def factor_at(sums, b, stride, columns, valid, LEVEL: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Decays [64, BLOCK] between tokens and the boundary in their block, and the sums of decays at that boundary.

    Args:
        sums: Pointer to the sums of the chunk's first token, which `share_sums` has stored.
        b: Sums of the tokens' log2 decays, from the start of the chunk.
        stride: Elements between two tokens.
        columns: Channels.
        valid: Which rows are tokens.
        LEVEL: The level.
        WIDTH: Number of channels.
        BLOCK: Number of columns.
    """
    r = tl.arange(0, CHUNK)
    HALF: tl.constexpr = CHUNK >> LEVEL + 1
    last = r // (2 * HALF) * (2 * HALF) + (HALF - 1)  # token before the boundary
    inside = last < tl.sum(valid.to(tl.int32), 0)
    at = load_tile(sums, last, stride, columns, inside, WIDTH, BLOCK)
    return exp2(-tl.abs((b - at).to(tl.float32))), at


@triton.jit
def load_symmetric(x):
    """X + Xᵀ for a strictly lower tile X [64, 64] in memory."""
    lower = load_pairs(x, tl.float32)
    return lower + tl.trans(lower)
