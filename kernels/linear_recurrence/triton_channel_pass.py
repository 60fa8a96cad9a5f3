"""Decays per key channel in one pass over the chunks of a sequence: outputs, states, and all gradients.

With b the log decays of a chunk summed from its start, and per channel two reference points r and s:

    Q' = Q e^{b − r}     K' = K e^{s − b}     S' = e^r S     dS' = e^{b_C − s} dS

    forward    O = Q' S' + lower(Q' K'ᵀ) V          S ← e^{b_C − s} (e^{s − r} S' + K'ᵀ V)
    backward   D = lower(dO Vᵀ)                     dV = lower(Q' K'ᵀ)ᵀ dO + K' dS'
               dQ = e^{b − r} ⊙ (dO S'ᵀ + D K')     dK = e^{s − b} ⊙ (V dS'ᵀ + Dᵀ Q')
               dS ← e^r (e^{s − r} dS' + Q'ᵀ dO)

Both reference points are b in the middle of the chunk, so that Q' K'ᵀ has the decays between its tokens. Where a decay
from there to an end of the chunk is too strong for the exponent of a factor (a steep channel), r is 0 and s = b_C: no
factor is above 1, what passes through the state is right, and what the channel adds to Q' K'ᵀ is e^{b_C} of the truth,
which is nothing. Two kernels add the truth to the results afterwards (`triton_steep.py`).

The states S' before all chunks, which the backward pass needs, are computed again.
"""

# Triton kernels: untyped, with branches that are resolved at compile time
# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from ..triton.tiles import CHUNK, exp2, load_tile, store_tile
from .triton_carry import state_at
from .triton_channel import SAFE, decays, row

MIDDLE = tl.constexpr(31)


@triton.jit
def sums(g, WIDE: tl.constexpr, PRECISION: tl.constexpr):
    """b − b_middle for all rows of a chunk, as products with a matrix of −1, 0 and 1: 16 bits of g, or all if WIDE."""
    if WIDE:
        b = tl.cumsum(g.to(tl.float64), 0)
        return b - row(b, MIDDLE)[None, :]
    r = tl.arange(0, CHUNK)
    i, j = r[:, None], r[None, :]
    sign = ((j > MIDDLE) & (j <= i)).to(tl.bfloat16) - ((j <= MIDDLE) & (j > i)).to(tl.bfloat16)
    high = g.to(tl.bfloat16)
    return tl.dot(sign, (g - high.to(tl.float32)).to(tl.bfloat16), tl.dot(sign, high))


@triton.jit
def halves(g, WIDE: tl.constexpr):
    """The sums over each half of the rows of a chunk."""
    if WIDE:
        g = g.to(tl.float64)
    early = (tl.arange(0, CHUNK) <= MIDDLE)[:, None]
    return tl.sum(tl.where(early, g, 0.0), 0), tl.sum(tl.where(early, 0.0, g), 0)


@triton.jit
def is_steep(early, late):
    return tl.maximum(-early, -late) > SAFE


@triton.jit
def half_at(ends, place, ck, K: tl.constexpr):
    """Where the sums over the first half of a chunk are; those over the second follow after K numbers."""
    return ends + place * (2 * K) + ck


@triton.jit
def input_gates(beta, at, valid):
    if beta is not None:
        return tl.load(beta + at, mask=valid, other=0.0)
    return tl.full([CHUNK], 1.0, tl.float32)


@triton.jit
def heads_of(n, groups, SUBHEADS: tl.constexpr):
    """The key head and the value head of a recurrence."""
    value_head = n // SUBHEADS
    key_head = (value_head // groups) * SUBHEADS + n % SUBHEADS
    return key_head.to(tl.int64), value_head.to(tl.int64)


@triton.jit(do_not_specialize=["chunks", "groups"])
def channel_forward(
    q,  # [tokens,·,K], like k
    k,
    v,  # [tokens,·,V]
    log_decay,  # [tokens,heads,K]
    beta,  # [tokens,heads], or None
    out,  # [tokens,heads,V]
    ends,  # [heads,chunks,2,K]: sums of log decays over each half of a chunk, in fp64 if WIDE
    first,  # [segments or sequences,heads,K,V], or None for zeros
    last,  # likewise, if needed
    segments,  # [segments,5]: first token, tokens, first chunk, first block, row of `first` and `last`
    scale,
    q_head,
    k_head,
    v_head,
    chunks,
    groups,  # value heads per key head
    q_token: tl.constexpr,
    k_token: tl.constexpr,
    v_token: tl.constexpr,
    heads: tl.constexpr,
    SUBHEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    WIDE: tl.constexpr,  # decays are summed in fp64
    DOT: tl.constexpr,  # dtype of the factors, which need the range of fp32
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    segment, n = tl.program_id(0) // heads, tl.program_id(0) % heads
    start = tl.load(segments + segment * 5).to(tl.int64)
    length = tl.load(segments + segment * 5 + 1)
    place = n.to(tl.int64) * chunks + tl.load(segments + segment * 5 + 2)
    state = tl.load(segments + segment * 5 + 4)
    key_head, value_head = heads_of(n, groups, SUBHEADS)
    q += start * q_token + key_head * q_head
    k += start * k_token + key_head * k_head
    v += start * v_token + value_head * v_head
    log_decay += (start * heads + n) * K
    out += (start * heads + n) * V
    if beta is not None:
        beta += start * heads + n
    r, ck, cv = tl.arange(0, CHUNK), tl.arange(0, BK), tl.arange(0, BV)
    lower = r[:, None] >= r[None, :]
    at_state, in_state = ck[:, None] * V + cv[None, :], (ck < K)[:, None] & (cv < V)[None, :]
    S = tl.zeros([BK, BV], tl.float32)
    if first is not None:
        S = tl.load(state_at(first, state, n, heads, K * V) + at_state, mask=in_state, other=0.0)
    for c in tl.range(0, tl.cdiv(length, CHUNK), num_stages=STAGES):
        t = c * CHUNK + r
        valid = t < length
        Q = load_tile(q, t, q_token, ck, valid, K, BK).to(tl.float32) * scale
        Kk = load_tile(k, t, k_token, ck, valid, K, BK).to(tl.float32)
        Z = load_tile(v, t, v_token, cv, valid, V, BV)
        g = decays(log_decay, t, heads * K, ck, valid, K, BK)
        if beta is not None:
            Kk *= input_gates(beta, t * heads, valid)[:, None]
        early, late = halves(g, WIDE)
        tl.store(half_at(ends, place + c, ck, K), early, mask=ck < K)
        tl.store(half_at(ends, place + c, ck, K) + K, late, mask=ck < K)
        steep = is_steep(early, late)
        b = sums(g, WIDE, PRECISION)
        Q = (Q * exp2((b + tl.where(steep, early, 0.0)[None, :]).to(tl.float32))).to(DOT)
        Kk = (Kk * exp2((tl.where(steep, late, 0.0)[None, :] - b).to(tl.float32))).to(DOT)
        A = tl.dot(Q, tl.trans(Kk), input_precision=PRECISION)
        A = tl.where(lower, A, 0.0).to(Z.dtype)
        S *= exp2(tl.where(steep, 0.0, early).to(tl.float32))[:, None]
        O = tl.dot(Q, S.to(DOT), input_precision=PRECISION)
        O = tl.dot(A, Z, O, input_precision=PRECISION)
        store_tile(out, t, heads * V, cv, valid, O, V, BV)
        S *= exp2(tl.where(steep, early + late, 0.0).to(tl.float32))[:, None]
        S = tl.dot(tl.trans(Kk), Z.to(DOT), S, input_precision=PRECISION)
        S *= exp2(tl.where(steep, 0.0, late).to(tl.float32))[:, None]
    if last is not None:
        tl.store(state_at(last, state, n, heads, K * V) + at_state, S, mask=in_state)


@triton.jit(do_not_specialize=["chunks", "groups"])
def channel_states(
    x,  # [tokens,·,K]: k, or in reverse q
    y,  # [tokens,·,V]: v, or in reverse dO
    log_decay,
    beta,
    states,  # [chunks,heads,K,V]: S' of each chunk, or None
    ends,  # None without states
    first,
    last,  # or None
    shrunk,  # [segments,heads,K]: how much of a state survives the segment, or None
    segments,
    scale,
    x_head,
    y_head,
    chunks,
    groups,
    x_token: tl.constexpr,
    y_token: tl.constexpr,
    heads: tl.constexpr,
    SUBHEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    REVERSE: tl.constexpr,
    WIDE: tl.constexpr,
    DOT: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    segment, n = tl.program_id(0) // heads, tl.program_id(0) % heads
    start = tl.load(segments + segment * 5).to(tl.int64)
    length = tl.load(segments + segment * 5 + 1)
    first_chunk = tl.load(segments + segment * 5 + 2)
    place = n.to(tl.int64) * chunks + first_chunk
    state = tl.load(segments + segment * 5 + 4)
    key_head, value_head = heads_of(n, groups, SUBHEADS)
    x += start * x_token + key_head * x_head
    y += start * y_token + value_head * y_head
    log_decay += (start * heads + n) * K
    if beta is not None:
        beta += start * heads + n
    r, ck, cv = tl.arange(0, CHUNK), tl.arange(0, BK), tl.arange(0, BV)
    at_state, in_state = ck[:, None] * V + cv[None, :], (ck < K)[:, None] & (cv < V)[None, :]
    S = tl.zeros([BK, BV], tl.float32)
    if first is not None:
        S = tl.load(state_at(first, state, n, heads, K * V) + at_state, mask=in_state, other=0.0)
    survives = tl.full([BK], 1.0, tl.float32)
    count = tl.cdiv(length, CHUNK)
    for i in tl.range(0, count, num_stages=STAGES):
        c = count - 1 - i if REVERSE else i
        t = c * CHUNK + r
        valid = t < length
        X = load_tile(x, t, x_token, ck, valid, K, BK).to(tl.float32)
        Y = load_tile(y, t, y_token, cv, valid, V, BV)
        g = decays(log_decay, t, heads * K, ck, valid, K, BK)
        early, late = halves(g, WIDE)
        b = sums(g, WIDE, PRECISION)
        if REVERSE:
            X *= exp2((b + early[None, :]).to(tl.float32)) * scale
        else:
            X *= exp2((late[None, :] - b).to(tl.float32))
            if beta is not None:
                X *= input_gates(beta, t * heads, valid)[:, None]
        if states is not None:
            tl.store(half_at(ends, place + c, ck, K), early, mask=ck < K)
            tl.store(half_at(ends, place + c, ck, K) + K, late, mask=ck < K)
            entering = S * exp2(tl.where(is_steep(early, late), 0.0, early).to(tl.float32))[:, None]
            at = state_at(states, first_chunk + c, n, heads, K * V) + at_state
            tl.store(at, entering.to(states.dtype.element_ty), mask=in_state)
        total = exp2((early + late).to(tl.float32))
        survives *= total
        S = tl.dot(tl.trans(X.to(Y.dtype)), Y, S * total[:, None], input_precision=PRECISION)
    if last is not None:
        tl.store(state_at(last, state, n, heads, K * V) + at_state, S, mask=in_state)
    if shrunk is not None:
        tl.store(shrunk + (segment.to(tl.int64) * heads + n) * K + ck, survives, mask=ck < K)


@triton.jit(do_not_specialize=["chunks", "groups"])
def channel_backward(
    q,
    k,
    v,  # [tokens,·,V], like grad
    grad,
    log_decay,
    beta,
    states,
    ends,
    q_grad,  # [tokens,heads,K], like k_grad and log_decay_grad
    k_grad,
    v_grad,  # [tokens,heads,V]
    log_decay_grad,  # or None
    beta_grad,  # [tokens,heads], or None
    last,  # gradients of the states after segments, or None for zeros
    first,  # and of those before them, if needed
    segments,
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
    WIDE: tl.constexpr,
    DOT: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    segment, n = tl.program_id(0) // heads, tl.program_id(0) % heads
    start = tl.load(segments + segment * 5).to(tl.int64)
    length = tl.load(segments + segment * 5 + 1)
    first_chunk = tl.load(segments + segment * 5 + 2)
    place = n.to(tl.int64) * chunks + first_chunk
    state = tl.load(segments + segment * 5 + 4)
    key_head, value_head = heads_of(n, groups, SUBHEADS)
    q += start * q_token + key_head * q_head
    k += start * k_token + key_head * k_head
    v += start * v_token + value_head * v_head
    grad += start * grad_token + value_head * grad_head
    own = (start * heads + n) * K
    log_decay += own
    q_grad += own
    k_grad += own
    v_grad += (start * heads + n) * V
    if log_decay_grad is not None:
        log_decay_grad += own
    if beta is not None:
        beta += start * heads + n
    if beta_grad is not None:
        beta_grad += start * heads + n
    r, ck, cv = tl.arange(0, CHUNK), tl.arange(0, BK), tl.arange(0, BV)
    distance = r[:, None] - r[None, :]
    at_state, in_state = ck[:, None] * V + cv[None, :], (ck < K)[:, None] & (cv < V)[None, :]
    dS = tl.zeros([BK, BV], tl.float32)
    if last is not None:
        dS = tl.load(state_at(last, state, n, heads, K * V) + at_state, mask=in_state, other=0.0)
    count = tl.cdiv(length, CHUNK)
    for i in tl.range(0, count, num_stages=STAGES):
        c = count - 1 - i
        t = c * CHUNK + r
        valid = t < length
        Q = load_tile(q, t, q_token, ck, valid, K, BK).to(tl.float32)
        Kk = load_tile(k, t, k_token, ck, valid, K, BK).to(tl.float32)
        Z = load_tile(v, t, v_token, cv, valid, V, BV)
        dO = load_tile(grad, t, grad_token, cv, valid, V, BV)
        g = decays(log_decay, t, heads * K, ck, valid, K, BK)
        S = tl.load(state_at(states, first_chunk + c, n, heads, K * V) + at_state, mask=in_state, other=0.0)
        early = tl.load(half_at(ends, place + c, ck, K), mask=ck < K, other=0.0)
        late = tl.load(half_at(ends, place + c, ck, K) + K, mask=ck < K, other=0.0)
        steep = is_steep(early, late)
        b = sums(g, WIDE, PRECISION)
        up = exp2((b + tl.where(steep, early, 0.0)[None, :]).to(tl.float32)) * scale
        down = exp2((tl.where(steep, late, 0.0)[None, :] - b).to(tl.float32))
        dS *= exp2(tl.where(steep, 0.0, late).to(tl.float32))[:, None]
        write = input_gates(beta, t * heads, valid)
        if beta is not None:
            Kk *= write[:, None]
        enter, leave = (Q * up).to(DOT), (Kk * down).to(DOT)

        D = tl.dot(dO, tl.trans(Z), input_precision=PRECISION)
        # a token paired with itself does not decay: these pairs stay out of the terms that have to cancel
        itself = tl.sum(tl.where(distance == 0, D, 0.0), 1)[:, None] * scale
        D = tl.where(distance > 0, D, 0.0).to(DOT)
        dQ = tl.dot(D, leave, input_precision=PRECISION)
        dQ = tl.dot(dO, tl.trans(S), dQ, input_precision=PRECISION) * up
        inside = tl.dot(tl.trans(D), enter, input_precision=PRECISION) * down
        to_state = tl.dot(Z.to(DOT), tl.trans(dS.to(DOT)), input_precision=PRECISION) * down
        if log_decay_grad is not None:
            # later tokens reach back past this one, earlier ones forward: sums of one sign, not differences
            after, before = (Q * dQ - Kk * inside).to(DOT), (Kk * to_state).to(DOT)
            through = tl.sum(S.to(tl.float32) * dS, 1) * exp2(tl.where(steep, early + late, 0.0).to(tl.float32))
            dg = tl.dot((distance > 0).to(DOT), before, input_precision=PRECISION)
            dg = tl.dot((distance <= 0).to(DOT), after, dg, input_precision=PRECISION) + through[None, :]
            store_tile(log_decay_grad, t, heads * K, ck, valid, dg, K, BK)
        dK = inside + to_state + itself * Q
        store_tile(q_grad, t, heads * K, ck, valid, dQ + itself * Kk, K, BK)
        store_tile(k_grad, t, heads * K, ck, valid, dK * write[:, None], K, BK)
        if beta_grad is not None:
            Kk = load_tile(k, t, k_token, ck, valid, K, BK).to(tl.float32)
            tl.store(beta_grad + t * heads, tl.sum(Kk * dK, 1), mask=valid)

        A = tl.dot(enter, tl.trans(leave), input_precision=PRECISION)
        A = tl.where(distance >= 0, A, 0.0).to(Z.dtype)
        dV = tl.dot(tl.trans(A), dO, input_precision=PRECISION)
        dV = tl.dot(leave, dS.to(DOT), dV, input_precision=PRECISION)
        store_tile(v_grad, t, heads * V, cv, valid, dV, V, BV)
        dS *= exp2(tl.where(steep, early + late, 0.0).to(tl.float32))[:, None]
        dS = tl.dot(tl.trans(enter), dO.to(DOT), dS, input_precision=PRECISION)
        dS *= exp2(tl.where(steep, 0.0, early).to(tl.float32))[:, None]
    if first is not None:
        tl.store(state_at(first, state, n, heads, K * V) + at_state, dS, mask=in_state)
