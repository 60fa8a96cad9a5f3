"""Short convolution, activation and norm in one pass over the tokens, and their gradient in another.

A program handles a run of consecutive tokens of one row, and a few heads. It walks along the run token by token with
the last inputs (and, backward, the unfinished gradients of the last inputs) in registers: every number is read once,
and computed once except for the W − 1 tokens before or after a run. An iteration is a few tokens, while the next ones
are being loaded; with four tokens and four taps, no input has to move between registers. A document that begins in the
run begins with its history.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"
# ruff: noqa: RUF005, SIM102

import triton
import triton.language as tl

from ...gpu.overlap import wait
from ...gpu.tiles import sigmoid


@triton.jit
def document_at(t, row, cu_seqlens, documents, T):
    """The sequence that token t of a row belongs to, its first token in the row, and one past its last."""
    if cu_seqlens is not None:
        n = 0
        after = documents
        while after - n > 1:
            middle = (n + after) // 2
            earlier = tl.load(cu_seqlens + middle).to(tl.int32) <= t
            n = tl.where(earlier, middle, n)
            after = tl.where(earlier, after, middle)
        start = tl.load(cu_seqlens + n).to(tl.int32)
        stop = tl.load(cu_seqlens + n + 1).to(tl.int32)
    else:
        n = row
        start = 0
        stop = T
    return n, start, stop


@triton.jit
def channels(block, C: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Channels [HEADS, BLOCK] of a block of heads, and the mask of those that exist."""
    within = tl.arange(0, BLOCK)[None, :]
    c = (block * HEADS + tl.arange(0, HEADS)[:, None]) * SIZE + within
    return c, (within < SIZE) & (c < C)


@triton.jit
def taps_of(weight, c, inside, W: tl.constexpr):
    """The taps of the convolution; the last one applies to the current token."""
    taps = ()
    for j in tl.static_range(W):
        taps = taps + (tl.load(weight + c * W + j, mask=inside, other=0.0).to(tl.float32),)
    return taps


@triton.jit
def inputs_at(x, t, T, x_row, inside, TOKENS: tl.constexpr):
    """The inputs of the iteration that begins with token t, which x points to; zeros past the last token."""
    coming = ()
    for m in tl.static_range(TOKENS):
        coming = coming + (tl.load(x + m * x_row, mask=inside & (t + m < T), other=0.0),)
    return coming


@triton.jit
def inputs_before(x, history, t, n, start, x_row, c, inside, C: tl.constexpr, W: tl.constexpr):
    """The W − 1 inputs before token t of sequence n: tokens and, before the first of them, the history or zeros."""
    past = ()
    for m in tl.static_range(W - 1, 0, -1):
        in_document = t - m >= start
        value = tl.load(x + (t - m).to(tl.int64) * x_row + c, mask=inside & in_document, other=0.0).to(tl.float32)
        if history is not None:
            place = n.to(tl.int64) * (W - 1) + (W - 1 + t - start - m)
            older = tl.load(history + place * C + c, mask=inside & (t - m < start), other=0.0)
            value += older.to(tl.float32)
        past = past + (value,)
    return past


@triton.jit
def convolve(window, taps, bias, W: tl.constexpr):
    """bias + Σ_j taps_j · window_j."""
    z = bias
    for j in tl.static_range(W):
        z += taps[j] * window[j]
    return z


@triton.jit
def bias_of(bias, c, inside, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    added = tl.zeros([HEADS, BLOCK], tl.float32)
    if bias is not None:
        added = tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
    return added


@triton.jit
def activate(z, inside, ACTIVATION: tl.constexpr, NORM: tl.constexpr):
    """The activation; zeros outside of the heads, if they are to be normalised."""
    if ACTIVATION == "silu":
        z = z * sigmoid(z)
    elif ACTIVATION == "relu":
        z = tl.maximum(z, 0.0)
    elif ACTIVATION == "elu1":
        z = tl.where(z > 0, 1 + z, tl.exp(tl.minimum(z, 0.0)))
        if NORM != "none":
            z = tl.where(inside, z, 0.0)
    return z


@triton.jit
def slope(z, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        s = sigmoid(z)
        d = s + z * s * (1 - s)  # the product z · s is the activation, which most callers have
    elif ACTIVATION == "relu":
        d = tl.where(z > 0, 1.0, 0.0)
    elif ACTIVATION == "elu1":
        d = tl.exp(tl.minimum(z, 0.0))
    else:
        d = tl.full(z.shape, 1.0, tl.float32)
    return d


@triton.jit
def normalise(a, NORM: tl.constexpr, EPS: tl.constexpr):
    """Normalise each head, a row of `a` [HEADS, BLOCK]."""
    if NORM == "l2":
        a = a * tl.rsqrt(tl.sum(a * a, 1) + EPS)[:, None]
    elif NORM == "l1":
        a = a * (1 / (tl.sum(tl.abs(a), 1) + EPS))[:, None]
    return a


@triton.jit
def normalise_gradient(a, dy, NORM: tl.constexpr, EPS: tl.constexpr):
    if NORM == "l2":
        r = tl.rsqrt(tl.sum(a * a, 1) + EPS)
        dy = r[:, None] * dy - a * (r * r * r * tl.sum(a * dy, 1))[:, None]
    elif NORM == "l1":
        r = 1 / (tl.sum(tl.abs(a), 1) + EPS)
        sign = tl.where(a > 0, 1.0, 0.0) - tl.where(a < 0, 1.0, 0.0)
        dy = r[:, None] * dy - sign * (r * r * tl.sum(a * dy, 1))[:, None]
    return dy


@triton.jit(do_not_specialize=["T", "length", "documents"])
def forward(
    x,  # [B,T,C], with any strides of rows and tokens
    weight,  # [C,1,W]
    bias,  # [C]
    history,  # [N,W−1,C]
    cu_seqlens,  # [N+1]
    y,  # [B,T,C]
    tail,  # [N,W−1,C]
    T,
    length,
    documents,
    x_batch,
    x_row,
    UNIT: tl.constexpr,  # of strides, which are passed divided by it: the compiler then sees that addresses are aligned
    C: tl.constexpr,
    W: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,  # per iteration; as many are being loaded for the next one
    ACTIVATION: tl.constexpr,
    NORM: tl.constexpr,
    EPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait(OVERLAP)
    BLOCKS: tl.constexpr = (C + HEADS * SIZE - 1) // (HEADS * SIZE)
    block, run, runs = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS, tl.cdiv(T, length)
    row, first = run // runs, run % runs * length
    last = tl.minimum(first + length, T)
    c, inside = channels(block, C, HEADS, SIZE, BLOCK)
    x_row *= UNIT
    x += row.to(tl.int64) * x_batch * UNIT
    y += row.to(tl.int64) * T * C
    added = bias_of(bias, c, inside, HEADS, BLOCK)
    if weight is not None:
        taps = taps_of(weight, c, inside, W)
    n, start, stop = document_at(first, row, cu_seqlens, documents, T)
    past = inputs_before(x, history, first, n, start, x_row, c, inside, C, W)
    coming = inputs_at(x + first.to(tl.int64) * x_row + c, first, T, x_row, inside, TOKENS)
    for i in tl.range(0, last - first, TOKENS):
        news = coming
        following = first + i + TOKENS
        coming = inputs_at(x + following.to(tl.int64) * x_row + c, following, T, x_row, inside, TOKENS)
        for j in tl.static_range(TOKENS):
            t = first + i + j
            if cu_seqlens is not None:
                if t == stop:
                    n, start, stop = document_at(t, row, cu_seqlens, documents, T)
                    past = inputs_before(x, history, t, n, start, x_row, c, inside, C, W)
            new = news[j].to(tl.float32)
            window = past + (new,)
            z = new
            if weight is not None:
                z = convolve(window, taps, added, W)
            a = activate(z, inside, ACTIVATION, NORM)
            at = y + t.to(tl.int64) * C + c
            tl.store(at, normalise(a, NORM, EPS).to(y.dtype.element_ty), mask=inside & (t < last))
            past = window[1:]
    if tail is not None:
        if last == T:
            past = inputs_before(x, history, T, n, start, x_row, c, inside, C, W)
            tl.debug_barrier()  # other threads may still have to read a history that is written next
            for j in tl.static_range(W - 1):
                place = (row.to(tl.int64) * (W - 1) + j) * C + c
                tl.store(tail + place, past[j].to(tail.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T", "length", "documents"])
def backward(
    x,  # [B,T,C], with any strides of rows and tokens, like dy
    weight,  # [C,1,W]
    bias,  # [C]
    history,  # [N,W−1,C]
    cu_seqlens,  # [N+1]
    dy,
    dx,  # [B,T,C], with any strides of rows and tokens
    dtaps,  # [runs,W (+1 for the bias),C]: to be summed over the runs
    dhistory,  # [N,W−1,W−1,C] zeroed: to be summed over the second axis, the tokens that read the history
    T,
    length,
    documents,
    x_batch,
    x_row,
    dy_batch,
    dy_row,
    dx_batch,
    dx_row,
    UNIT: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,  # per iteration; as many are being loaded for the next one
    ACTIVATION: tl.constexpr,
    NORM: tl.constexpr,
    EPS: tl.constexpr,
):
    BLOCKS: tl.constexpr = (C + HEADS * SIZE - 1) // (HEADS * SIZE)
    block, run, runs = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS, tl.cdiv(T, length)
    row, first = run // runs, run % runs * length
    last = tl.minimum(first + length, T)
    c, inside = channels(block, C, HEADS, SIZE, BLOCK)
    x_row, dy_row, dx_row = x_row * UNIT, dy_row * UNIT, dx_row * UNIT
    x += row.to(tl.int64) * x_batch * UNIT
    dy += row.to(tl.int64) * dy_batch * UNIT + first.to(tl.int64) * dy_row + c
    dx += row.to(tl.int64) * dx_batch * UNIT + (first.to(tl.int64) - (W - 1)) * dx_row + c
    nothing = tl.zeros([HEADS, BLOCK], tl.float32)
    added = bias_of(bias, c, inside, HEADS, BLOCK)
    pending = ()  # gradients of the last W − 1 inputs, to which later tokens will add
    totals = (nothing,)  # gradients of the bias, then of the taps
    if weight is not None:
        taps = taps_of(weight, c, inside, W)
        for _ in tl.static_range(W - 1):
            pending = pending + (nothing,)
        for _ in tl.static_range(W):
            totals = totals + (nothing,)
    n, start, stop = document_at(first, row, cu_seqlens, documents, T)
    past = inputs_before(x, history, first, n, start, x_row, c, inside, C, W)
    ahead = x + first.to(tl.int64) * x_row + c
    coming = inputs_at(ahead, first, T, x_row, inside, TOKENS)
    dcoming = inputs_at(dy, first, T, dy_row, inside, TOKENS)
    for i in tl.range(0, last - first + W - 1, TOKENS):
        news, dnews = coming, dcoming
        ahead += TOKENS * x_row
        dy += TOKENS * dy_row
        coming = inputs_at(ahead, first + i + TOKENS, T, x_row, inside, TOKENS)
        dcoming = inputs_at(dy, first + i + TOKENS, T, dy_row, inside, TOKENS)
        for m in tl.static_range(TOKENS):
            t = first + i + m
            if cu_seqlens is not None:
                if t == stop:
                    n, start, stop = document_at(t, row, cu_seqlens, documents, T)
                    past = inputs_before(x, history, t, n, start, x_row, c, inside, C, W)
            new, dz = news[m].to(tl.float32), dnews[m].to(tl.float32)
            window = past + (new,)
            z = new
            if weight is not None:
                z = convolve(window, taps, added, W)
            if NORM != "none":
                dz = normalise_gradient(activate(z, inside, ACTIVATION, NORM), dz, NORM, EPS)
            dz *= slope(z, ACTIVATION)
            if weight is not None:
                own = tl.where(t < last, dz, 0.0)
                summed = (totals[0] + own,)
                for j in tl.static_range(W):
                    summed = summed + (totals[1 + j] + own * window[j],)
                totals = summed
                if dhistory is not None:
                    # written once, by the run that has the first token of the document
                    if (t - start < W - 1) & (start >= first) & (start < last):
                        for j in tl.static_range(W - 1):
                            met = j - (t - start)
                            tap = tl.load(weight + c * W + met, mask=inside & (met >= 0), other=0.0).to(tl.float32)
                            place = (n.to(tl.int64) * (W - 1) + t - start) * (W - 1) + j
                            tl.store(dhistory + place * C + c, tap * dz, mask=inside)
                reached = ()
                for j in tl.static_range(W):
                    share = taps[j] * dz
                    if cu_seqlens is not None:
                        share = tl.where(t - start >= W - 1 - j, share, 0.0)
                    if j < W - 1:
                        share += pending[j]
                    reached = reached + (share,)
                finished = reached[0]
                pending = reached[1:]
            else:
                finished = dz
            token = t - (W - 1)
            tl.store(dx + m * dx_row, finished.to(dx.dtype.element_ty), mask=inside & (token >= first) & (token < last))
            past = window[1:]
        dx += TOKENS * dx_row
    if weight is not None:
        ROWS: tl.constexpr = W + 1 if bias is not None else W
        dtaps += run.to(tl.int64) * ROWS * C + c
        for j in tl.static_range(W):
            tl.store(dtaps + j * C, totals[1 + j], mask=inside)
        if bias is not None:
            tl.store(dtaps + W * C, totals[0], mask=inside)
