"""The part of a chunk that needs no state: one program per chunk and recurrence. Letters as in `chunk_general.py`.

It stores (I + L)⁻¹, P (I + L)⁻¹, and what the passes along time multiply with the state: Q̃, Ã, K̂ and e^{b_C}. The
decays between tokens come by halves (`gpu/halves.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from ....gpu.halves import LEVELS, factor_at, places, separated, share_sums
from ....gpu.tiles import CHUNK, chunk_at, exp2, load_tile, store_pairs, store_tile
from ..prepare import unit_lower_inverse
from ..steps import of_step
from .decays import decays_of, strength_of


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
    sums,  # [rows,M,K]: memory for sums of decays
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
    WIDE: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    MERGE: tl.constexpr,
):
    m = tl.program_id(0) % M
    tile = tl.program_id(0).to(tl.int64)
    token, stop = chunk_at(chunks, tl.program_id(0) // M)
    keys: tl.constexpr = M // R  # heads of q and k
    head = (m // (E * R)) * E + m % E
    r = tl.arange(0, CHUNK)
    valid = r < stop - token
    start = token.to(tl.int64)
    token_q, q_rows, is_read = of_step(token, r, valid, STEPS - 1, STEPS)
    start_q = token_q.to(tl.int64)
    q += (start_q * keys + head) * K
    k += (start * keys + head) * K
    own, own_q = (start * M + m) * K, (start_q * M + m) * K  # offsets in tensors [rows,M,K] and [tokens,M,K]
    write = strength_of(beta, token, valid, m, M)
    i, j = places()
    P, L = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
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
        read = b - g if BEFORE else b
        share_sums(sums + own, b, M * K, ck, valid, K, BK)
        store_tile(read_q + own_q, q_rows, M * K, ck, is_read, Q * exp2(b.to(tl.float32)) * scale, K, BK)
        store_tile(read_a + own, r, M * K, ck, valid, A * exp2(read.to(tl.float32)), K, BK)
        leaving = exp2(tl.minimum((last[None, :] - b).to(tl.float32), 0.0))
        store_tile(keep + own, r, M * K, ck, valid, Kk * leaving, K, BK)
        tl.store(total + tile * K + ck, exp2(last.to(tl.float32)), mask=ck < K)
        P += tl.where(i == j, tl.sum(Q * Kk, 1)[:, None], 0.0)
        for level in tl.static_range(LEVELS):
            factor, at = factor_at(sums + own, b, M * K, ck, valid, level, K, BK)
            factor_a = exp2(tl.minimum((read - at).to(tl.float32), 0.0)) if BEFORE else factor
            earlier = tl.trans((Kk * factor).to(DOT))
            here = separated(level) & (j < i)
            P += tl.where(here, tl.dot((Q * factor).to(DOT), earlier, input_precision=PRECISION), 0.0)
            L += tl.where(here, tl.dot((A * factor_a).to(DOT), earlier, input_precision=PRECISION), 0.0)
    solve = unit_lower_inverse(L, MERGE)
    store_pairs(inverse + tile * (CHUNK * CHUNK), solve)
    store_pairs(scores + tile * (CHUNK * CHUNK), tl.dot(P * scale, solve, input_precision=MERGE))
