"""The part of a chunk that needs no state: one program per chunk and recurrence. Letters as in `chunk_general.py`.

It stores (I + L)⁻¹, P (I + L)⁻¹, and what the passes along time multiply with the state: Q̃, Ã, K̂ and e^{b_C}.

The fast kernel computes all pairs of tokens with one reference point and marks the first row of each chunk that is too
steep for it. The slow one computes and stores such rows alone: which kernel a row is from depends on no later token.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: SIM108

import triton
import triton.language as tl

from ....gpu.tiles import CHUNK, chunk_at, exp2, load_tile, store_pairs, store_tile
from ....linear_recurrence.gpu.vector_decay import BLOCK, SAFE, SAFE_FP32, reference, row
from ..prepare import unit_lower_inverse
from ..steps import of_step
from .decays import decays_of, power, split, strength_of


@triton.jit
def between_blocks(Q, A, Kk, b, read, P, L, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """Add the pairs of tokens in different blocks of 16, with the last row of the earlier block as reference."""
    r = tl.arange(0, CHUNK)
    for j in range(0, CHUNK // BLOCK - 1):
        end = j * BLOCK + BLOCK - 1
        last = row(b, end)[None, :]
        below, inside = r > end, (r <= end) & (r > end - BLOCK)
        down = tl.where(inside[:, None], Kk * exp2(tl.minimum((last - b).to(tl.float32), 0.0)), 0.0).to(DOT)
        up = tl.where(below[:, None], exp2(tl.minimum((b - last).to(tl.float32), 0.0)), 0.0)
        up_read = tl.where(below[:, None], exp2(tl.minimum((read - last).to(tl.float32), 0.0)), 0.0)
        P = tl.dot((Q * up).to(DOT), tl.trans(down), P, input_precision=PRECISION)
        L = tl.dot((A * up_read).to(DOT), tl.trans(down), L, input_precision=PRECISION)
    return P, L


@triton.jit(do_not_specialize=["scale"])
def prepare(
    q,
    k,
    erase,  # [rows,M,K], or with PRODUCT factors on the keys; None if they are the keys
    beta,
    log_decay,
    inverse,
    scores,
    read_q,  # [tokens,M,K]
    read_a,  # [rows,M,K], like keep
    keep,
    total,  # [chunks,M,K]
    steep,  # [chunks,M]: first row that is too steep for the fast way, or 64
    chunks,
    scale,
    M: tl.constexpr,
    E: tl.constexpr,
    R: tl.constexpr,
    STEPS: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    BEFORE: tl.constexpr,
    PRODUCT: tl.constexpr,
    SLOW: tl.constexpr,
    WIDE: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    MERGE: tl.constexpr,
):
    m = tl.program_id(0) % M
    tile = tl.program_id(0).to(tl.int64)
    if SLOW:
        first = tl.load(steep + tile)
        if first == CHUNK:
            return
    token, stop = chunk_at(chunks, tl.program_id(0) // M)
    keys: tl.constexpr = M // R  # heads of q and k
    head = (m // (E * R)) * E + m % E
    r = tl.arange(0, CHUNK)
    valid = r < stop - token
    distance = r[:, None] - r[None, :]
    start = token.to(tl.int64)
    token_q, q_rows, is_read = of_step(token, r, valid, STEPS - 1, STEPS)
    start_q = token_q.to(tl.int64)
    q += (start_q * keys + head) * K
    k += (start * keys + head) * K
    own, own_q = (start * M + m) * K, (start_q * M + m) * K  # offsets in tensors [rows,M,K] and [tokens,M,K]
    write = strength_of(beta, token, valid, m, M)
    P, L = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    exact_P, exact_L = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    REACH: tl.constexpr = SAFE_FP32 if WIDE else SAFE
    farthest = tl.zeros([CHUNK, BK], tl.float32)
    for column in range(0, K, BK):
        ck = column + tl.arange(0, BK)
        Q = load_tile(q, q_rows, keys * K, ck, is_read, K, BK).to(tl.float32)
        Kk = load_tile(k, r, keys * K, ck, valid, K, BK).to(tl.float32)
        if erase is None:
            A = Kk
        else:
            A = load_tile(erase + own, r, M * K, ck, valid, K, BK).to(tl.float32)
            if PRODUCT:
                A *= Kk
        if beta is not None:
            A *= write[:, None]
        g = decays_of(log_decay, token, r, valid, m, ck, M, K, STEPS)
        if WIDE:
            g = g.to(tl.float64)
        b, last = tl.cumsum(g, 0), tl.sum(g, 0)
        if BEFORE:
            read = b - g
        else:
            read = b
        anchor = reference(b, REACH)
        # as `first_steep_row`: the anchor counts only for the second half
        farthest = tl.minimum(farthest, tl.where((r < CHUNK // 2)[:, None], b, b - anchor[None, :]).to(tl.float32))
        part, inverse_part, whole = split(b)
        whole_anchor = anchor.to(tl.int32)[None, :]
        up = part * power(whole - whole_anchor)
        if BEFORE:
            read_part, _, read_whole = split(read)
            up_read = read_part * power(read_whole - whole_anchor)
        else:
            up_read = up
        if not SLOW:
            entering = part * power(whole)
            store_tile(read_q + own_q, q_rows, M * K, ck, is_read, Q * entering * scale, K, BK)
            if BEFORE:
                entering = read_part * power(read_whole)
            store_tile(read_a + own, r, M * K, ck, valid, A * entering, K, BK)
            last_part, _, last_whole = split(last)
            left = inverse_part * last_part[None, :] * power(last_whole[None, :] - whole)
            store_tile(keep + own, r, M * K, ck, valid, Kk * left, K, BK)
            tl.store(total + tile * K + ck, last_part * power(last_whole), mask=ck < K)
        right = tl.trans((Kk * inverse_part * power(whole_anchor - whole)).to(DOT))
        P = tl.dot((Q * up).to(DOT), right, P, input_precision=PRECISION)
        L = tl.dot((A * up_read).to(DOT), right, L, input_precision=PRECISION)
        if SLOW:
            exact_P, exact_L = between_blocks(Q, A, Kk, b, read, exact_P, exact_L, DOT, PRECISION)
            between = tl.zeros([CHUNK, BK], tl.float32)  # Σ of the decays after row r − s, up to row r
            for s in range(0, BLOCK):
                inside = valid & (r % BLOCK >= s)
                earlier = load_tile(k, r - s, keys * K, ck, inside, K, BK).to(tl.float32)
                pairs = tl.sum(Q * earlier * exp2(between), 1)
                exact_P += tl.where((distance == s) & inside[:, None], pairs[:, None], 0.0)
                if s > 0:
                    span = tl.minimum(between - g.to(tl.float32), 0.0) if BEFORE else between
                    pairs = tl.sum(A * earlier * exp2(span), 1)
                    exact_L += tl.where((distance == s) & inside[:, None], pairs[:, None], 0.0)
                between += decays_of(log_decay, token, r - s, inside, m, ck, M, K, STEPS)
    if SLOW:
        P = tl.where(r[:, None] >= first, exact_P, P)
        L = tl.where(r[:, None] >= first, exact_L, L)
    else:
        wrong = tl.min(tl.where(tl.min(farthest, 1) < -REACH, r, CHUNK), 0)
        tl.store(steep + tile, wrong.to(tl.int8))
    P = tl.where(distance >= 0, P * scale, 0.0)
    L = tl.where(distance > 0, L, 0.0)
    solve = unit_lower_inverse(L, MERGE)
    weights = tl.dot(P, solve, input_precision=MERGE)
    if SLOW:  # other rows keep the bits of the fast kernel
        at, mask = r[:, None] * CHUNK + r[None, :], (r >= first)[:, None]
        tl.store(inverse + tile * (CHUNK * CHUNK) + at, solve.to(inverse.dtype.element_ty), mask=mask)
        tl.store(scores + tile * (CHUNK * CHUNK) + at, weights.to(scores.dtype.element_ty), mask=mask)
    else:
        store_pairs(inverse + tile * (CHUNK * CHUNK), solve)
        store_pairs(scores + tile * (CHUNK * CHUNK), weights)
