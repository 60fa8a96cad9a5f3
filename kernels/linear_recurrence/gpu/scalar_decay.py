"""Decays per head (or none): their sums, the scores inside the chunks, and the gradients of the gates.

With b the log decays summed inside a chunk, D_ij = exp(b_i − b_j) for j ≤ i:

    P = scale · Q Kᵀ ⊙ D · diag(β)        dP = scale · dO Vᵀ ⊙ D · diag(β)

The gradient of b_i inside a chunk is the i-th row sum minus the i-th column sum of dO Vᵀ ⊙ P in fp32, so that terms
that should cancel do. Its diagonal is left out: it would cancel too, but it does not decay, and under strong decays its
rounding would be larger than all the rest. Between chunks the gradient is q·dq − k·dk of the parts that go through the
state.
"""

# Triton kernels: untyped, with branches that are resolved at compile time
# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from ...gpu.tiles import CHUNK, LEAST, LOG2E, exp2, load_tile, pair_of
from .sequential_pass import BALANCE, COLUMNS, ENTER, LEAVE, REST_OF_SUMS, SUMS, SURVIVES, TOTAL


@triton.jit
def log2_decay(log_decay, n, tokens, heads, valid, GATE: tl.constexpr):
    """Log decays of a chunk in log2 units; 0 (no decay) for padding."""
    if GATE == "none":
        g = tl.zeros([CHUNK], tl.float32)
    elif GATE == "constant":
        g = tl.load(log_decay + n + tokens * 0, mask=valid, other=0.0)
    else:
        g = tl.load(log_decay + tokens * heads + n, mask=valid, other=0.0)
    return tl.maximum(g * LOG2E, LEAST)


@triton.jit
def chunk_decays(log_decay, n, tokens, heads, valid, GATE: tl.constexpr, WIDE: tl.constexpr):
    """Summed log2 decays of a chunk, the decay factor over it, and the factors from each token to its end."""
    g = log2_decay(log_decay, n, tokens, heads, valid, GATE)
    if WIDE:
        g = g.to(tl.float64)
    b = tl.cumsum(g, 0)
    last = tl.sum(g, 0)
    return b, exp2(last.to(tl.float32)), exp2(tl.minimum((last - b).to(tl.float32), 0.0))


@triton.jit(do_not_specialize=["heads", "chunks"])
def head_gates(
    gates,  # [heads,chunks,PARTS,64]: ENTER, LEAVE, TOTAL, SUMS, REST_OF_SUMS or, with KEEP, β in its place
    log_decay,  # [tokens,heads]
    beta,  # [tokens,heads]
    table,  # [chunks,2]: first token, tokens
    scale,
    heads,
    chunks,
    PARTS: tl.constexpr,
    GATE: tl.constexpr,  # none, constant, head
    WIDE: tl.constexpr,  # sum decays in fp64
    KEEP: tl.constexpr,
):
    """Everything that the passes need from the gates if they compute the scores themselves."""
    c, n = pair_of(chunks)
    start = tl.load(table + c * 2).to(tl.int64)
    count = tl.load(table + c * 2 + 1)
    gates += (n.to(tl.int64) * chunks + c) * (PARTS * CHUNK)
    r = tl.arange(0, CHUNK)
    valid = r < count
    b, total, w = chunk_decays(log_decay, n, start + r, heads, valid, GATE, WIDE)
    high = b.to(tl.float32)
    rest = (b - high).to(tl.float32)
    if beta is not None:
        input_gate = tl.load(beta + (start + r) * heads + n, mask=valid, other=0.0)
        w *= input_gate
        if KEEP:
            rest = input_gate
    tl.store(gates + TOTAL * CHUNK, total)
    tl.store(gates + SUMS * CHUNK + r, high)
    tl.store(gates + REST_OF_SUMS * CHUNK + r, rest)
    tl.store(gates + ENTER * CHUNK + r, exp2(high) * scale)
    tl.store(gates + LEAVE * CHUNK + r, w)


@triton.jit(do_not_specialize=["chunks", "groups"])
def head_scores(
    q,  # [tokens,·,K], like k
    k,
    v,  # [tokens,·,V], like grad
    grad,  # gradient of o
    log_decay,  # [heads] or [tokens,heads]
    beta,  # [tokens,heads]
    scores,  # [heads,chunks,64,64]
    score_grads,  # like scores, if needed
    gates,  # [heads,chunks,PARTS,64]: ENTER, LEAVE, TOTAL, and with GATES also SURVIVES, BALANCE, COLUMNS
    table,  # [chunks,2]: first token, tokens
    scale,
    q_head,
    k_head,
    v_head,
    grad_head,
    chunks,
    groups,
    q_token: tl.constexpr,
    k_token: tl.constexpr,
    v_token: tl.constexpr,
    grad_token: tl.constexpr,
    heads: tl.constexpr,
    SUBHEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PARTS: tl.constexpr,
    GATE: tl.constexpr,  # none, constant, head
    GATES: tl.constexpr,
    WIDE: tl.constexpr,  # sum decays in fp64
    PRECISION: tl.constexpr,
):
    c, n = pair_of(chunks)
    start = tl.load(table + c * 2).to(tl.int64)
    count = tl.load(table + c * 2 + 1)
    value_head = n // SUBHEADS
    key_head = (value_head // groups) * SUBHEADS + n % SUBHEADS
    place = n.to(tl.int64) * chunks + c
    gates += place * (PARTS * CHUNK)
    r = tl.arange(0, CHUNK)
    valid = r < count
    ck = tl.arange(0, BK)
    Q = load_tile(q + start * q_token + key_head.to(tl.int64) * q_head, r, q_token, ck, valid, K, BK)
    Kk = load_tile(k + start * k_token + key_head.to(tl.int64) * k_head, r, k_token, ck, valid, K, BK)
    P = tl.dot(Q, tl.trans(Kk), input_precision=PRECISION)
    lower = r[:, None] >= r[None, :]
    if GATE == "none":
        D = tl.where(lower, scale, 0.0)
        e = tl.full([CHUNK], 1.0, tl.float32)
        w = e
    else:
        b, total, w = chunk_decays(log_decay, n, start + r, heads, valid, GATE, WIDE)
        between = tl.minimum((b[:, None] - b[None, :]).to(tl.float32), 0.0)
        D = tl.where(lower, exp2(between) * scale, 0.0)
        e = exp2(b.to(tl.float32))
        tl.store(gates + TOTAL * CHUNK, total)
    if beta is not None:
        input_gate = tl.load(beta + (start + r) * heads + n, mask=valid, other=0.0)
    else:
        input_gate = tl.full([CHUNK], 1.0, tl.float32)
    P = P * D
    tile = place * (CHUNK * CHUNK) + r[:, None] * CHUNK + r[None, :]
    tl.store(scores + tile, (P * input_gate[None, :]).to(scores.dtype.element_ty))
    tl.store(gates + ENTER * CHUNK + r, e * scale)
    tl.store(gates + LEAVE * CHUNK + r, w * input_gate)
    if score_grads is not None:
        cv = tl.arange(0, BV)
        dO = load_tile(grad + start * grad_token + value_head.to(tl.int64) * grad_head, r, grad_token, cv, valid, V, BV)
        Vv = load_tile(v + start * v_token + value_head.to(tl.int64) * v_head, r, v_token, cv, valid, V, BV)
        dP = tl.dot(dO, tl.trans(Vv), input_precision=PRECISION)
        tl.store(score_grads + tile, (dP * D * input_gate[None, :]).to(scores.dtype.element_ty))
        if GATES:
            G = dP * P
            tl.store(gates + SURVIVES * CHUNK + r, w)
            tl.store(gates + COLUMNS * CHUNK + r, tl.sum(G, 0))
            G = tl.where(r[:, None] > r[None, :], G * input_gate[None, :], 0.0)
            tl.store(gates + BALANCE * CHUNK + r, tl.sum(G, 1) - tl.sum(G, 0))


@triton.jit(do_not_specialize=["heads", "chunks", "blocks"])
def head_gate_grads(
    read,  # [key slices,heads,chunks,64]: Σ enter q · (what q reads from the state)
    written,  # Σ leave k · (what k reads from the gradient of the state); for `beta_grad` […,64,2]: also without leave
    gates,  # [heads,chunks,PARTS,64]: SURVIVES, BALANCE, COLUMNS
    log_decay,  # [heads] or [tokens,heads]
    anchors,  # [key slices,heads,blocks]
    log_decay_grad,  # [tokens,heads], if needed; like beta_grad
    beta_grad,
    table,  # [blocks,3]: first token, tokens, first chunk
    heads,
    chunks,
    blocks,
    PARTS: tl.constexpr,
    GATE: tl.constexpr,  # none, constant, head
    SLICES: tl.constexpr,
    BLOCK: tl.constexpr,  # tokens of a block
):
    block, n = pair_of(blocks)
    start = tl.load(table + block * 3).to(tl.int64)
    count = tl.load(table + block * 3 + 1)
    first_chunk = tl.load(table + block * 3 + 2)
    DECAY: tl.constexpr = log_decay_grad is not None
    BETA_GRAD: tl.constexpr = beta_grad is not None
    t = tl.arange(0, BLOCK)
    valid = t < count
    place = n.to(tl.int64) * chunks + first_chunk
    at = place * CHUNK + t
    gates += (place + t // CHUNK) * (PARTS * CHUNK) + t % CHUNK
    x = tl.zeros([BLOCK], tl.float32)
    y = tl.zeros([BLOCK], tl.float32)
    z = tl.zeros([BLOCK], tl.float32)
    anchor = 0.0
    for i in tl.static_range(SLICES):
        shift = i * heads.to(tl.int64) * chunks * CHUNK
        if BETA_GRAD:
            z += tl.load(written + (shift + at) * 2 + 1, mask=valid, other=0.0)
        if DECAY:
            x += tl.load(read + shift + at, mask=valid, other=0.0)
            y += tl.load(written + (shift + at) * (2 if BETA_GRAD else 1), mask=valid, other=0.0)
            anchor += tl.load(anchors + (i * heads + n) * blocks + block)
    tokens = (start + t) * heads + n
    if BETA_GRAD:
        inside = tl.load(gates + COLUMNS * CHUNK, mask=valid, other=0.0)
        tl.store(beta_grad + tokens, z * tl.load(gates + SURVIVES * CHUNK, mask=valid, other=0.0) + inside, mask=valid)
    if DECAY:
        d = x - y + tl.load(gates + BALANCE * CHUNK, mask=valid, other=0.0)
        dg = tl.cumsum(d, 0, reverse=True) + anchor
        g = tl.load(log_decay + (n + t * 0 if GATE == "constant" else tokens), mask=valid, other=0.0)
        tl.store(log_decay_grad + tokens, tl.where(g * LOG2E <= LEAST, 0.0, dg), mask=valid)
