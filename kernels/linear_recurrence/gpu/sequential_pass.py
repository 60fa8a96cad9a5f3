"""The sequential part of every linear recurrence: one kernel for outputs and for the gradients of q, k and v.

All four are the same pass over the chunks of a sequence, with a state that accumulates y ⊗ z and is read by x:

    out = enter ⊙ (X S) + P Z        S ← total · S + Yᵀ (leave ⊙ Z)

| out | x, y, z   | order   | P                | state     |
|-----|-----------|---------|------------------|-----------|
| o   | q, k, v   | forward | scores           | S [K,V]   |
| dq  | do, v, k  | forward | their gradient   | Sᵀ [V,K]  |
| dk  | v, do, q  | reverse | … transposed     | dSᵀ [V,K] |
| dv  | k, q, do  | reverse | scores, transp.  | dS [K,V]  |

In reverse order `enter` and `leave` swap places. P is X Yᵀ with the decays between its tokens; the pass computes it
where nothing else needs it and only a few programs would compute the same one. With a decay per channel, q and k
already contain their decays, `total` is a vector over K, and dq and dk are the contributions of the state alone: the
rest is computed chunk by chunk.

No chunk state is saved, except for the gradient of a decay per channel. Where there are too few programs to fill the
device, sequences are cut into segments (`segments.py`).
"""

# Triton kernels: untyped, with branches that are resolved at compile time
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: SIM108

import triton
import triton.language as tl

from ...gpu.tiles import CHUNK, LEAST, LOG2E, exp2, load_tile, pair_of, store_tile

# the gates of a chunk, as vectors over its tokens; b are the log decays summed from its start, in log2 units
ENTER = tl.constexpr(0)  # scale · e^b
LEAVE = tl.constexpr(1)  # β e^{b_C − b}
TOTAL = tl.constexpr(2)  # e^{b_C}, once
SUMS = tl.constexpr(3)  # where passes compute the scores: b,
REST_OF_SUMS = tl.constexpr(4)  # and what is lost of it in fp32
SURVIVES = tl.constexpr(3)  # where gates have gradients: e^{b_C − b},
BALANCE = tl.constexpr(4)  # row sums minus column sums of dO Vᵀ ⊙ P below its diagonal,
COLUMNS = tl.constexpr(5)  # and its column sums, with the diagonal and without β


@triton.jit
def part_at(gates, chunk, PART: tl.constexpr, PARTS: tl.constexpr):
    """Pointer to one part of the gates of a chunk."""
    return gates + chunk * (PARTS * CHUNK) + PART * CHUNK


@triton.jit
def state_at(states, row, n, heads, SIZE: tl.constexpr):
    """Pointer to one of the states [·,heads,SIZE]."""
    return states + (row.to(tl.int64) * heads + n) * SIZE


@triton.jit
def segment_of(segments, heads, DZ: tl.constexpr, BZ: tl.constexpr):
    """Slice, segment and recurrence of a program; first token, tokens, first chunk and block, row of its state."""
    slices: tl.constexpr = (DZ + BZ - 1) // BZ
    part, n = pair_of(tl.num_programs(0) // heads)
    segment = part // slices
    at = segments + segment * 5
    start, length = tl.load(at).to(tl.int64), tl.load(at + 1)
    return part % slices, segment, n, start, length, tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)


@triton.jit
def key_head_of(n, groups, SUBHEADS: tl.constexpr):
    """The key head of a recurrence, whose value head is n // SUBHEADS."""
    return (n // SUBHEADS // groups) * SUBHEADS + n % SUBHEADS


@triton.jit
def constant_decay(log_decay, n, DECAY: tl.constexpr):
    """The log decay of a step, in log2 units."""
    if DECAY:
        # volatile: otherwise everything derived from it is hoisted out of the loop, into scarce registers
        return tl.maximum(tl.load(log_decay + n, volatile=True) * LOG2E, LEAST)
    return 0.0


@triton.jit
def constant_factors(g, here, scale, beta, at, valid):
    """scale · e^b and β e^{b_C − b} [64] of a chunk of `here` tokens that all decay by g; their β are at `at`."""
    r = tl.arange(0, CHUNK)
    entering = exp2((r + 1).to(tl.float32) * g) * scale
    leaving = exp2(tl.maximum(here - 1 - r, 0).to(tl.float32) * g)
    if beta is not None:
        leaving *= tl.load(beta + at, mask=valid, other=0.0)
    return entering, leaving


@triton.jit
def factors(
    gates, g, c, length, scale, beta, at, valid, REVERSE: tl.constexpr, CONSTANT: tl.constexpr, PARTS: tl.constexpr
):
    """`enter` and `leave` [64] of a chunk; in reverse they swap places. With CONSTANT, g is the decay of all tokens."""
    if CONSTANT:
        entering, leaving = constant_factors(g, tl.minimum(length - c * CHUNK, CHUNK), scale, beta, at, valid)
        into = leaving if REVERSE else entering
        rest = entering if REVERSE else leaving
    else:
        r = tl.arange(0, CHUNK)
        into = tl.load(part_at(gates, c, LEAVE if REVERSE else ENTER, PARTS) + r)
        rest = tl.load(part_at(gates, c, ENTER if REVERSE else LEAVE, PARTS) + r)
    return into, rest


@triton.jit
def constant_decay_inside(g):
    """[64,64]: the decay between any two tokens of a chunk, in either direction."""
    r = tl.arange(0, CHUNK)
    return exp2(tl.abs(r[:, None] - r[None, :]).to(tl.float32) * g)


@triton.jit
def decay_inside(gates, WIDE: tl.constexpr):
    """Decays between all pairs of tokens of a chunk, where they differ from token to token."""
    r = tl.arange(0, CHUNK)
    b = tl.load(gates + SUMS * CHUNK + r)
    between = b[:, None] - b[None, :]
    if WIDE:
        rest = tl.load(gates + REST_OF_SUMS * CHUNK + r)
        between += rest[:, None] - rest[None, :]
    return exp2(-tl.abs(between))


@triton.jit
def gated_scores(P, beta, at, valid, REVERSE: tl.constexpr):
    """Scores times β, zero where the key comes after the query. Rows are queries, or in reverse keys."""
    r = tl.arange(0, CHUNK)
    if beta is not None:
        write = tl.load(beta + at, mask=valid, other=0.0)
        P *= write[:, None] if REVERSE else write[None, :]
    before = r[:, None] <= r[None, :] if REVERSE else r[:, None] >= r[None, :]
    return tl.where(before, P, 0.0)


@triton.jit
def load_scores(scores, t, REVERSE: tl.constexpr):
    """Scores that were computed before the pass."""
    P = tl.load(scores + t[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :])
    return tl.trans(P) if REVERSE else P


@triton.jit
def store_products(products, t, W, O, into, DTYPE: tl.constexpr, PLAIN: tl.constexpr):
    """Store Σ W · O with the factor that O is multiplied by, and if PLAIN, without it as well."""
    # nothing is added, but W gets the layout of O: otherwise `into` would be loaded in two layouts, and two programs
    # would no longer fit on a multiprocessor
    W = W.to(tl.float32) + O * 0.0
    # rounded as the state of the other pass accumulates it, so that what should cancel does
    product = tl.sum(O * (W * into[:, None]).to(DTYPE).to(tl.float32), 1)
    if PLAIN:
        both = tl.join(product, tl.sum(O * W, 1))
        tl.store(products + t[:, None] * 2 + tl.arange(0, 2)[None, :], both)
    else:
        tl.store(products + t, product)


@triton.jit(do_not_specialize=["chunks", "blocks", "per_block", "groups"])
def output_pass(
    x,  # [tokens,·,DX], like y
    y,
    z,  # [tokens,·,DZ], like other
    other,
    out,  # [tokens,heads,DZ]
    scores,  # [heads,chunks,64,64], or None if they are computed here
    beta,  # [tokens,heads], if the scores are computed here and have one
    gates,  # [heads,chunks,PARTS,64]: ENTER …; per channel [heads,chunks,K]: e^{b_C}; CONSTANT: log decays [heads]
    products,  # [blocks of DZ,heads,chunks,64], PLAIN […,64,2]: Σ other · (the state's part of out)
    checkpoints,  # [blocks or chunks,heads,K,V], where gates have gradients
    anchors,  # [blocks of DZ,heads,blocks]: <S,dS> at the start of a block; per channel [heads,chunks,K]
    first,  # [segments or sequences,heads,K,V], or None for zeros
    last,  # likewise, if needed
    segments,  # [segments,5]: first token, tokens, first chunk, first block, row of `first` and `last`
    x_head,
    y_head,
    z_head,
    other_head,
    scale,
    chunks,
    blocks,
    per_block,
    groups,  # value heads per key head
    x_token: tl.constexpr,
    y_token: tl.constexpr,
    z_token: tl.constexpr,
    other_token: tl.constexpr,
    heads: tl.constexpr,
    SUBHEADS: tl.constexpr,
    DX: tl.constexpr,
    DZ: tl.constexpr,
    BX: tl.constexpr,
    BZ: tl.constexpr,
    PARTS: tl.constexpr,
    MODE: tl.constexpr,  # o, dq, dk, dv
    CHANNEL: tl.constexpr,  # decay per channel
    DECAY: tl.constexpr,
    CONSTANT: tl.constexpr,  # scores are computed here, and all tokens decay alike or not at all
    WIDE: tl.constexpr,  # decays between tokens are differences of sums in fp64
    PLAIN: tl.constexpr,  # also the product without the factor `enter` or `leave`, for the gradient of β
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    REVERSE: tl.constexpr = (MODE == "dk") or (MODE == "dv")
    TRANSPOSED: tl.constexpr = (MODE == "dq") or (MODE == "dk")
    INSIDE: tl.constexpr = scores is None
    GATES: tl.constexpr = checkpoints is not None
    slice_, segment, n, start, length, first_chunk, first_block, state = segment_of(segments, heads, DZ, BZ)
    count = tl.cdiv(length, CHUNK)
    value_head = n // SUBHEADS
    key_head = n if CHANNEL else key_head_of(n, groups, SUBHEADS)
    x_row = value_head if TRANSPOSED else key_head
    z_row = key_head if TRANSPOSED else value_head
    # 64-bit offsets up to the segment; inside it 32 bits suffice, because segments are cut short enough
    x += start * x_token + x_row.to(tl.int64) * x_head
    y += start * y_token + x_row.to(tl.int64) * y_head
    z += start * z_token + z_row.to(tl.int64) * z_head
    out += (start * heads + n) * DZ
    place = n.to(tl.int64) * chunks + first_chunk
    if not INSIDE:
        scores += place * (CHUNK * CHUNK)
    if beta is not None:
        beta += start * heads + n
    if GATES and TRANSPOSED and not CHANNEL:
        other += start * other_token + z_row.to(tl.int64) * other_head
        products += (slice_.to(tl.int64) * heads * chunks + place) * (CHUNK * (2 if PLAIN else 1))

    r = tl.arange(0, CHUNK)
    cx = tl.arange(0, BX)
    cz = slice_ * BZ + tl.arange(0, BZ)
    at_state = cz[None, :] * DX + cx[:, None] if TRANSPOSED else cx[:, None] * DZ + cz[None, :]
    in_state = (cx < DX)[:, None] & (cz < DZ)[None, :]
    if first is not None:
        S = tl.load(state_at(first, state, n, heads, DX * DZ) + at_state, mask=in_state, other=0.0)
    else:
        S = tl.zeros([BX, BZ], tl.float32)
    g = 0.0
    if CHANNEL:
        # the decay lies along K, which is z where the state is transposed
        cd = cz if TRANSPOSED else cx
        DK: tl.constexpr = DZ if TRANSPOSED else DX
        gates += place * DK
    elif not CONSTANT:
        gates += place * (PARTS * CHUNK)
    elif not REVERSE:
        g = constant_decay(gates, n, DECAY)

    for b in range(0, tl.cdiv(count, per_block)):
        block = tl.cdiv(count, per_block) - 1 - b if REVERSE else b
        block_start = block * per_block
        block_count = tl.minimum(per_block, count - block_start)
        if GATES and not CHANNEL and MODE == "dq":
            at = state_at(checkpoints, first_block + block, n, heads, DX * DZ) + at_state
            tl.store(at, S.to(checkpoints.dtype.element_ty), mask=in_state)
        if DECAY and not CHANNEL and not CONSTANT:
            # loaded one chunk ahead: a scalar that is needed immediately would stall every step
            next_ = block_start + block_count - 1 if REVERSE else block_start
            following = tl.load(part_at(gates, next_, TOTAL, PARTS))
        for i in tl.range(0, block_count, num_stages=STAGES):
            c = block_start + (block_count - 1 - i if REVERSE else i)
            t = c * CHUNK + r
            valid = t < length
            Y = load_tile(y, t, y_token, cx, valid, DX, BX)
            Z = load_tile(z, t, z_token, cz, valid, DZ, BZ)
            X = load_tile(x, t, x_token, cx, valid, DX, BX)
            if CONSTANT and REVERSE:
                g = constant_decay(gates, n, DECAY)
            if not CHANNEL:
                into, rest = factors(gates, g, c, length, scale, beta, t * heads, valid, REVERSE, CONSTANT, PARTS)
            if DECAY:
                if CONSTANT:
                    keep = exp2(tl.minimum(length - c * CHUNK, CHUNK).to(tl.float32) * g)
                elif CHANNEL:
                    keep = tl.load(gates + c * DK + cd, mask=cd < DK, other=0.0)
                else:
                    keep = following
                    ahead = tl.maximum(c - 1, 0) if REVERSE else tl.minimum(c + 1, count - 1)
                    following = tl.load(part_at(gates, ahead, TOTAL, PARTS))
            if GATES and CHANNEL:
                at = state_at(checkpoints, first_chunk + c, n, heads, DX * DZ) + at_state
                if MODE == "dq":
                    tl.store(at, S.to(checkpoints.dtype.element_ty), mask=in_state)
                if MODE == "dk":
                    before = tl.load(at, mask=in_state, other=0.0).to(tl.float32)
                    tl.store(anchors + (place + c) * DZ + cz, tl.sum(S * before, 0), mask=cz < DZ)
            if INSIDE:
                P = tl.dot(X, tl.trans(Y), input_precision=PRECISION) * scale
                if DECAY:
                    P *= constant_decay_inside(g) if CONSTANT else decay_inside(gates + c * (PARTS * CHUNK), WIDE)
                P = gated_scores(P, beta, t * heads, valid, REVERSE).to(Z.dtype)
            O = tl.dot(X, S.to(X.dtype), input_precision=PRECISION)
            if GATES and TRANSPOSED and not CHANNEL:
                W = load_tile(other, t, other_token, cz, valid, DZ, BZ)
                store_products(products, t, W, O, into, Y.dtype, PLAIN)
            if not CHANNEL:
                O = O * into[:, None]
            if INSIDE:
                O = tl.dot(P, Z, O, input_precision=PRECISION)
            elif not (CHANNEL and TRANSPOSED):
                O = tl.dot(load_scores(scores, t, REVERSE), Z, O, input_precision=PRECISION)
            store_tile(out, t, heads * DZ, cz, valid, O, DZ, BZ)
            if not CHANNEL:
                Z = (Z.to(tl.float32) * rest[:, None]).to(Y.dtype)
            if DECAY:
                if CHANNEL:
                    S = S * (keep[None, :] if TRANSPOSED else keep[:, None])
                else:
                    S = S * keep
            S = tl.dot(tl.trans(Y), Z, S, input_precision=PRECISION)
        if GATES and not CHANNEL and MODE == "dk":
            at = state_at(checkpoints, first_block + block, n, heads, DX * DZ) + at_state
            checkpoint = tl.load(at, mask=in_state, other=0.0)
            anchor = tl.sum(tl.sum(S * checkpoint, 1), 0)
            tl.store(anchors + (slice_ * heads + n) * blocks + first_block + block, anchor)
    if last is not None:
        tl.store(state_at(last, state, n, heads, DX * DZ) + at_state, S, mask=in_state)
