"""Decays per key channel: the work that is done chunk by chunk, before and after the sequential passes.

A_ij = Σ_k q_ik k_jk exp(b_ik − b_jk), j ≤ i, does not factor into q and k without a reference point r. Where the decay
inside a chunk is moderate (the fast way), r is near its middle row and A = (Q e^{b − r})(K e^{r − b})ᵀ; what overflows
lies above the diagonal and is masked. Otherwise rows and columns are split into blocks of 16: between blocks, r is the
last row of the earlier one and no factor exceeds 1; inside a block every pair uses the difference of its two rows. Both
are exact.

No bit of a row depends on later tokens. The reference point of the fast way does, so it is a whole number of powers of
two, which scale the factors of a pair exactly and cancel in their product. Which way computes a row depends on the
decays up to that row.

Each way is a separate kernel, because the registers of the slow one would slow down the fast one: the fast one computes
all rows and finds the first one of each chunk that it got wrong, the slow one computes the rows from there on again.
"""

# Triton kernels: untyped, with branches that are resolved at compile time
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: SIM102

import triton
import triton.language as tl

from ...gpu.tiles import CHUNK, LEAST, LOG2E, exp2, load_tile, pair_of, store_tile

# Factors up to 2^±100 (e^±69) keep all their digits in bf16, if q and k are not below 2^-26. Matrix products in fp32
# cut them into parts, the smallest of which is 2^24 times smaller.
SAFE = tl.constexpr(100.0)
SAFE_FP32 = tl.constexpr(76.0)
BLOCK = tl.constexpr(16)


@triton.jit
def decays(log_decay, t, stride, columns, valid, K: tl.constexpr, BK: tl.constexpr):
    g = load_tile(log_decay, t, stride, columns, valid, K, BK).to(tl.float32)
    return tl.maximum(g * LOG2E, LEAST)


@triton.jit
def row(x, i):
    """Row i of a tile in registers."""
    r = tl.arange(0, CHUNK)
    return tl.sum(tl.where(r[:, None] == i, x, 0.0), 0)


@triton.jit
def reference(b, REACH: tl.constexpr):
    """A whole number near the sums of decays in the middle row, from which no moderate sum is far."""
    return tl.maximum(tl.floor(row(b, CHUNK // 2 - 1) + 0.5), -REACH)


@triton.jit
def first_steep_row(b, anchor, REACH: tl.constexpr):
    """The first row with a decay that is too strong for the fast way; `CHUNK` if there is none.

    It depends on no later row: the anchor counts only for the second half.
    """
    r = tl.arange(0, CHUNK)
    reach = tl.where((r < CHUNK // 2)[:, None], b, b - anchor[None, :])
    return tl.min(tl.where(tl.min(reach, 1) < -REACH, r, CHUNK), 0)


@triton.jit
def around(b, anchor):
    """2^(b − anchor) and 2^(anchor − b); another anchor multiplies both by a power of two and changes no other bit."""
    whole = tl.floor(b)
    part = (b - whole).to(tl.float32)
    shift = (whole - anchor[None, :]).to(tl.float32)
    return exp2(part) * exp2(shift), exp2(-part) * exp2(-shift)


@triton.jit(do_not_specialize=["chunks", "groups"])
def channel_scores(
    q,  # [tokens,·,K], like k
    k,
    log_decay,  # [tokens,heads,K]
    beta,  # [tokens,heads]
    scores,  # [heads,chunks,64,64]
    entering,  # [tokens,heads,K]: scale · q e^b
    leaving,  # β k e^{b_C − b}
    total,  # [heads,chunks,K]: e^{b_C}
    steep,  # [heads,chunks]: first row with a decay that is too strong for one reference point, or 64
    table,  # [chunks,2]: first token, tokens
    scale,
    q_head,
    k_head,
    chunks,
    groups,
    q_token: tl.constexpr,
    k_token: tl.constexpr,
    heads: tl.constexpr,
    SUBHEADS: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    SLOW: tl.constexpr,
    WIDE: tl.constexpr,
    DOT: tl.constexpr,  # dtype of the factors, which need the range of fp32
    PRECISION: tl.constexpr,
):
    c, n = pair_of(chunks)
    start = tl.load(table + c * 2).to(tl.int64)
    count = tl.load(table + c * 2 + 1)
    value_head = n // SUBHEADS
    key_head = (value_head // groups) * SUBHEADS + n % SUBHEADS
    place = n.to(tl.int64) * chunks + c
    if SLOW:
        if tl.load(steep + place) == CHUNK:
            return
    q += start * q_token + key_head.to(tl.int64) * q_head
    k += start * k_token + key_head.to(tl.int64) * k_head
    own = (start * heads + n) * K  # offset in tensors [tokens,heads,K]
    r = tl.arange(0, CHUNK)
    valid = r < count
    distance = r[:, None] - r[None, :]
    if beta is not None:
        input_gate = tl.load(beta + (start + r) * heads + n, mask=valid, other=0.0)
    else:
        input_gate = tl.full([CHUNK], 1.0, tl.float32)
    A = tl.zeros([CHUNK, CHUNK], tl.float32)
    wrong = CHUNK
    for first in range(0, K, BK):
        ck = first + tl.arange(0, BK)
        Q = load_tile(q, r, q_token, ck, valid, K, BK).to(tl.float32)
        Kk = load_tile(k, r, k_token, ck, valid, K, BK).to(tl.float32)
        g = decays(log_decay + own, r, heads * K, ck, valid, K, BK)
        if WIDE:
            g = g.to(tl.float64)
        b = tl.cumsum(g, 0)
        last = tl.sum(g, 0)
        if SLOW:
            for j in range(0, CHUNK // BLOCK - 1):
                end = j * BLOCK + BLOCK - 1
                shifted = (b - row(b, end)[None, :]).to(tl.float32)
                below, inside = r > end, (r <= end) & (r > end - BLOCK)
                up = tl.where(below[:, None], Q * exp2(tl.minimum(shifted, 0.0)), 0.0).to(DOT)
                down = tl.where(inside[:, None], Kk * exp2(tl.minimum(-shifted, 0.0)), 0.0).to(DOT)
                A = tl.dot(up, tl.trans(down), A, input_precision=PRECISION)
            between = tl.zeros([CHUNK, BK], tl.float32)
            for s in range(0, BLOCK):
                inside = valid & (r % BLOCK >= s)
                earlier = load_tile(k, r - s, k_token, ck, inside, K, BK).to(tl.float32)
                pairs = tl.sum(Q * earlier * exp2(between), 1)
                A += tl.where((distance == s) & inside[:, None], pairs[:, None], 0.0)
                between += decays(log_decay + own, r - s, heads * K, ck, inside, K, BK)
        else:
            e = exp2(b.to(tl.float32))
            w = exp2(tl.minimum((last[None, :] - b).to(tl.float32), 0.0)) * input_gate[:, None]
            store_tile(entering + own, r, heads * K, ck, valid, Q * e * scale, K, BK)
            store_tile(leaving + own, r, heads * K, ck, valid, Kk * w, K, BK)
            tl.store(total + place * K + ck, exp2(last.to(tl.float32)), mask=ck < K)
            REACH: tl.constexpr = SAFE_FP32 if WIDE else SAFE
            anchor = reference(b, REACH)
            wrong = tl.minimum(wrong, first_steep_row(b, anchor, REACH))
            up, down = around(b, anchor)
            A = tl.dot((Q * up).to(DOT), tl.trans((Kk * down).to(DOT)), A, input_precision=PRECISION)
    if SLOW:
        written = r >= tl.load(steep + place)
    else:
        written = r < CHUNK
        tl.store(steep + place, wrong.to(tl.int8))
    A = tl.where(distance >= 0, A * scale * input_gate[None, :], 0.0)
    tl.store(
        scores + place * (CHUNK * CHUNK) + r[:, None] * CHUNK + r[None, :],
        A.to(scores.dtype.element_ty),
        mask=written[:, None],
    )


@triton.jit(do_not_specialize=["chunks"])
def channel_score_grads(
    v,  # [tokens,heads,V], like grad
    grad,
    score_grads,  # [heads,chunks,64,64]: scale · dO Vᵀ below the diagonal
    diagonal,  # [heads,chunks,64]: … and on the diagonal
    table,
    scale,
    v_head,
    grad_head,
    chunks,
    v_token: tl.constexpr,
    grad_token: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    c, h = pair_of(chunks)
    start = tl.load(table + c * 2).to(tl.int64)
    place = h.to(tl.int64) * chunks + c
    r = tl.arange(0, CHUNK)
    valid = r < tl.load(table + c * 2 + 1)
    cv = tl.arange(0, BV)
    dO = load_tile(grad + start * grad_token + h.to(tl.int64) * grad_head, r, grad_token, cv, valid, V, BV)
    Vv = load_tile(v + start * v_token + h.to(tl.int64) * v_head, r, v_token, cv, valid, V, BV)
    D = tl.dot(dO, tl.trans(Vv), input_precision=PRECISION) * scale
    distance = r[:, None] - r[None, :]
    # a token paired with itself does not decay: these pairs stay out of the terms that have to cancel
    tl.store(diagonal + place * CHUNK + r, tl.sum(tl.where(distance == 0, D, 0.0), 1))
    tile = place * (CHUNK * CHUNK) + r[:, None] * CHUNK + r[None, :]
    tl.store(score_grads + tile, tl.where(distance > 0, D, 0.0).to(score_grads.dtype.element_ty))


@triton.jit(do_not_specialize=["chunks", "groups", "tokens"])
def channel_grads(
    q,
    k,
    score_grads,  # per value head
    diagonal,
    log_decay,
    beta,
    read,  # [tokens,heads,K]: dO Sᵀ
    written,  # V dSᵀ
    anchors,  # [heads,chunks,K]: rows of S before the chunk ⊙ its gradient after the chunk
    q_grad,  # [tokens,heads,K], like k_grad and log_decay_grad
    k_grad,
    log_decay_grad,
    beta_grad,  # [key slices,tokens,heads]
    steep,
    table,
    scale,
    q_head,
    k_head,
    tokens,
    chunks,
    groups,
    q_token: tl.constexpr,
    k_token: tl.constexpr,
    heads: tl.constexpr,
    SUBHEADS: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    SLOW: tl.constexpr,
    WIDE: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    slices = (K + BK - 1) // BK
    part, n = pair_of(chunks * slices)
    slice_, c = part % slices, part // slices
    start = tl.load(table + c * 2).to(tl.int64)
    count = tl.load(table + c * 2 + 1)
    value_head = n // SUBHEADS
    key_head = (value_head // groups) * SUBHEADS + n % SUBHEADS
    place = n.to(tl.int64) * chunks + c
    if SLOW:
        if tl.load(steep + place) == CHUNK:
            return
    q += start * q_token + key_head.to(tl.int64) * q_head
    k += start * k_token + key_head.to(tl.int64) * k_head
    own = (start * heads + n) * K
    r = tl.arange(0, CHUNK)
    valid = r < count
    if beta is not None:
        input_gate = tl.load(beta + (start + r) * heads + n, mask=valid, other=0.0)
    else:
        input_gate = tl.full([CHUNK], 1.0, tl.float32)

    of_head = value_head.to(tl.int64) * chunks + c
    D = tl.load(score_grads + of_head * (CHUNK * CHUNK) + r[:, None] * CHUNK + r[None, :]).to(DOT)
    on_diagonal = tl.load(diagonal + of_head * CHUNK + r)

    ck = slice_ * BK + tl.arange(0, BK)
    Q = load_tile(q, r, q_token, ck, valid, K, BK).to(tl.float32)
    Kk = load_tile(k, r, k_token, ck, valid, K, BK).to(tl.float32)
    gated = Kk * input_gate[:, None]
    g = decays(log_decay + own, r, heads * K, ck, valid, K, BK)
    if WIDE:
        g = g.to(tl.float64)
    b = tl.cumsum(g, 0)
    last = tl.sum(g, 0)
    if SLOW:
        dQ = tl.zeros([CHUNK, BK], tl.float32)
        dK = tl.zeros([CHUNK, BK], tl.float32)
        for j in range(0, CHUNK // BLOCK - 1):
            end = j * BLOCK + BLOCK - 1
            shifted = (b - row(b, end)[None, :]).to(tl.float32)
            below, inside = r > end, (r <= end) & (r > end - BLOCK)
            up = tl.where(below[:, None], exp2(tl.minimum(shifted, 0.0)), 0.0)
            down = tl.where(inside[:, None], exp2(tl.minimum(-shifted, 0.0)), 0.0)
            dQ += tl.dot(D, (gated * down).to(DOT), input_precision=PRECISION) * up
            dK += tl.dot(tl.trans(D), (Q * up).to(DOT), input_precision=PRECISION) * down
        at_row = of_head * (CHUNK * CHUNK) + r * CHUNK
        # two loops: one would need too many registers
        between = tl.zeros([CHUNK, BK], tl.float32)
        for s in range(1, BLOCK):
            inside = valid & (r % BLOCK >= s)
            between += decays(log_decay + own, r - s + 1, heads * K, ck, inside, K, BK)
            earlier = load_tile(k, r - s, k_token, ck, inside, K, BK).to(tl.float32)
            factor = tl.load(score_grads + at_row + r - s, mask=inside, other=0.0).to(tl.float32)
            if beta is not None:
                factor *= tl.load(beta + (start + r - s) * heads + n, mask=inside, other=0.0)
            dQ += factor[:, None] * earlier * exp2(between)
        between = tl.zeros([CHUNK, BK], tl.float32)
        for s in range(1, BLOCK):
            inside = (r + s < count) & (r % BLOCK + s < BLOCK)
            between += decays(log_decay + own, r + s, heads * K, ck, inside, K, BK)
            later = load_tile(q, r + s, q_token, ck, inside, K, BK).to(tl.float32)
            factor = tl.load(score_grads + at_row + s * CHUNK + r, mask=inside, other=0.0).to(tl.float32)
            dK += factor[:, None] * later * exp2(between)
    else:
        shifted = (b - row(b, CHUNK // 2 - 1)[None, :]).to(tl.float32)
        up, down = exp2(shifted), exp2(-shifted)
        dQ = tl.dot(D, (gated * down).to(DOT), input_precision=PRECISION) * up
        dK = tl.dot(tl.trans(D), (Q * up).to(DOT), input_precision=PRECISION) * down

    from_state = load_tile(read + own, r, heads * K, ck, valid, K, BK).to(tl.float32)
    to_state = load_tile(written + own, r, heads * K, ck, valid, K, BK).to(tl.float32)
    from_state = from_state * exp2(b.to(tl.float32)) * scale
    to_state = to_state * exp2(tl.minimum((last[None, :] - b).to(tl.float32), 0.0))
    if log_decay_grad is not None:
        # later tokens reach back past this one, earlier ones forward: sums of one sign, not differences
        after = Q * (from_state + dQ) - gated * dK
        before = gated * to_state
        through = tl.load(anchors + place * K + ck, mask=ck < K, other=0.0) * exp2(last.to(tl.float32))
        change = before - after
        dg = tl.cumsum(change, 0) - change + (tl.sum(after, 0) + through)[None, :]
        dg = tl.where(g <= LEAST, 0.0, dg)  # nothing passes a reset
        store_tile(log_decay_grad + own, r, heads * K, ck, valid, dg, K, BK)
    dQ += from_state + on_diagonal[:, None] * gated
    dK += to_state + on_diagonal[:, None] * Q
    store_tile(q_grad + own, r, heads * K, ck, valid, dQ, K, BK)
    store_tile(k_grad + own, r, heads * K, ck, valid, dK * input_gate[:, None], K, BK)
    if beta_grad is not None:
        at = slice_.to(tl.int64) * tokens * heads + (start + r) * heads + n
        tl.store(beta_grad + at, tl.sum(Kk * dK, 1), mask=valid)
