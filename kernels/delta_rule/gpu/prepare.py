"""The part of a chunk of the (gated) delta rule that needs no state: one program per chunk and recurrence.

With b the summed log decays, D_ij = exp(b_i − b_j) for j ≤ i and N the strict lower part of D ⊙ K Kᵀ, it stores

    inverse = (I + βN)⁻¹ diag(β)      gates = e^b, e^{b_C − b}, and b in two fp32 parts
    scores = (scale · D ⊙ Q Kᵀ, j ≤ i) inverse      bounds = Σ log₂ (e^g max(1, |1 − β |k|²|)), ≥ log₂ ‖transition‖

The scores apply to what enters the system, V − e^b K S, not to its solution U: at β = 2, U is large and alternates, and
the rounding errors of U, and of scores that read U, would not cancel in the sum.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from ...gpu.tiles import CHUNK, LEAST, LOG2E, chunk_at, exp2, load_tokens, store_pairs
from .steps import load_last, of_step

# The gradient of β is computed by dividing by β², so that β must not be zero. This changes no result.
LEAST_BETA: tl.constexpr = tl.constexpr(2.0**-50)


@triton.jit
def pair_decay(high, low):
    """The decay factor between any two tokens of a chunk, symmetric [64, 64]; high + low [64] is the summed log2 decay.

    As sums of two fp32 numbers, the differences of sums in the thousands keep their digits. No positive number is
    exponentiated.
    """
    difference = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    return exp2(-tl.abs(difference))


@triton.jit
def nonzero(beta):
    return tl.where(tl.abs(beta) < LEAST_BETA, LEAST_BETA, beta)


@triton.jit
def unit_lower_inverse(lower, PRECISION: tl.constexpr):
    """(I + lower)⁻¹ for a strictly lower matrix [64, 64].

    Substitution inside the four diagonal blocks of 16, in fp32, then two rounds of merging neighbours. The product
    (I − L)(I + L²)(I + L⁴)… would need nothing but matrix products, but its terms reach 1e9 where keys are correlated.
    """
    block, r = tl.arange(0, 4), tl.arange(0, 16)
    diagonal = (block[:, None] == block[None, :])[:, None, :, None]
    blocks = tl.sum(tl.where(diagonal, tl.reshape(lower, (4, 16, 4, 16)), 0.0), 2)
    inverse = tl.where((r[:, None] == r[None, :])[None, :, :], 1.0, tl.zeros([4, 16, 16], tl.float32))
    for j in range(15):
        # row j is final: eliminate it from the rows below
        row = tl.sum(tl.where((r == j)[None, :, None], inverse, 0.0), 1)
        column = tl.sum(tl.where((r == j)[None, None, :], blocks, 0.0), 2)
        inverse -= column[:, :, None] * row[:, None, :]
    full = tl.reshape(tl.where(diagonal, inverse[:, :, None, :], 0.0), (64, 64))

    i = tl.arange(0, 64)
    halves = i[:, None] // 32 != i[None, :] // 32
    quarters = (i[:, None] // 16 != i[None, :] // 16) & (i[:, None] // 32 == i[None, :] // 32)
    step = tl.dot(full, tl.where(quarters, lower, 0.0), input_precision=PRECISION)
    full -= tl.dot(step, full, input_precision=PRECISION)
    step = tl.dot(full, tl.where(halves, lower, 0.0), input_precision=PRECISION)
    return full - tl.dot(step, full, input_precision=PRECISION)


@triton.jit
def prepare(
    q,
    k,
    log_decay,
    beta,
    inverse,
    scores,
    gates,
    bounds,  # [chunks,M], if sequences are cut
    chunks,
    scale,
    M: tl.constexpr,
    E: tl.constexpr,
    R: tl.constexpr,
    STEPS: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    GATE: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    MERGE: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    token, stop = chunk_at(chunks, tl.program_id(0) // M)
    m = tl.program_id(0) % M
    keys: tl.constexpr = M // R  # heads of q and k
    head = (m // (E * R)) * E + m % E
    r = tl.arange(0, CHUNK)
    valid = r < stop - token
    per_step = token.to(tl.int64) * M + r * M + m
    first, r_g, is_first = of_step(token, r, valid, 0, STEPS)

    if GATE == "none":
        g = tl.zeros([CHUNK], tl.float64)
    elif GATE == "constant":
        g = tl.where(is_first, tl.load(log_decay + m).to(tl.float64) * LOG2E, 0.0)
    else:
        at_g = log_decay + (first.to(tl.int64) * M + r_g * M + m)
        g = tl.load(at_g, mask=is_first, other=0.0).to(tl.float64) * LOG2E
    g = tl.where(g < LEAST, LEAST, g)
    b = tl.cumsum(g, 0)
    high = b.to(tl.float32)
    low = (b - high.to(tl.float64)).to(tl.float32)
    at = gates + tile * (4 * CHUNK) + r
    tl.store(at, exp2(high))
    tl.store(at + CHUNK, exp2((tl.sum(g, 0) - b).to(tl.float32)))
    tl.store(at + 2 * CHUNK, high)
    tl.store(at + 3 * CHUNK, low)

    overlap, dots = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    for column in tl.static_range(0, K, BK):
        keys_here = load_tokens(k + head * K, token, stop, keys * K, column, K, BK, DTYPE)
        queries = load_last(q + head * K, token, stop, keys * K, column, K, BK, DTYPE, STEPS)
        overlap = tl.dot(keys_here, tl.trans(keys_here), overlap, input_precision=PRECISION)
        dots = tl.dot(queries, tl.trans(keys_here), dots, input_precision=PRECISION)
    D = pair_decay(high, low)
    dots = tl.where(r[:, None] >= r[None, :], dots * D * scale, 0.0)
    write = nonzero(tl.load(beta + per_step, mask=valid, other=0.0).to(tl.float32))
    if bounds is not None:
        length = tl.sum(tl.where(r[:, None] == r[None, :], overlap, 0.0), 1)
        growth = tl.sum(tl.log2(tl.maximum(tl.abs(1 - write * length), 1.0)), 0)
        tl.store(bounds + tile, tl.sum(g, 0).to(tl.float32) + growth)
    lower = tl.where(r[:, None] > r[None, :], overlap * D * write[:, None], 0.0)
    solve = unit_lower_inverse(lower, MERGE)
    store_pairs(inverse + tile * (CHUNK * CHUNK), solve * write[None, :])
    store_pairs(scores + tile * (CHUNK * CHUNK), tl.dot(dots, solve, input_precision=MERGE) * write[None, :])
