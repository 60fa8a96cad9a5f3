"""Attention with log decays and its gradients, in blocks of queries and keys as in FlashAttention-2.

A score is q_i·k_j·scale + F_i − F_j, where F sums the log decays, in log2 units. F is stored as an integer and a
remainder in [0, 1), whose differences have all digits, however large F is. In blocks that need a mask, that is how the
score of each pair is computed. In all others, a tile of TILE tokens ends between the keys and the queries, at token e:
F_e − F_j is stored for each key, and F_i − F_e is a number of each query, which is added to the maximum of its scores.
In both terms, e has its integer alone.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from ...gpu.tiles import LOG2E, exp2, pair_of

NEVER = tl.constexpr(2**31 - 1)


@triton.jit
def load_tokens(x, start, stride, T, ROWS: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr, DTYPE: tl.constexpr):
    """[ROWS,D] of the tokens from `start` on. MASKED: zeros from token T on, which others do not reach."""
    r, c = tl.arange(0, ROWS), tl.arange(0, D)
    at = x + tl.cast(start, tl.int64) * stride + (r[:, None] * stride + c[None, :])
    if MASKED:
        return tl.load(at, mask=(start + r < T)[:, None], other=0.0).to(DTYPE)
    return tl.load(at).to(DTYPE)


@triton.jit
def store_tokens(x, start, stride, T, value, ROWS: tl.constexpr, D: tl.constexpr):
    r, c = tl.arange(0, ROWS), tl.arange(0, D)
    at = x + tl.cast(start, tl.int64) * stride + (r[:, None] * stride + c[None, :])
    tl.store(at, value.to(x.dtype.element_ty), mask=(start + r < T)[:, None])


@triton.jit
def load_sums(totals, t, T):
    """Integers and remainders of F at tokens t."""
    return tl.load(totals + t, mask=t < T, other=0.0), tl.load(totals + T + t, mask=t < T, other=0.0)


@triton.jit
def masked_scores(scaled, i, first, whole_i, rest_i, j, whole_j, rest_j):
    decayed = scaled + ((whole_i - whole_j) + (rest_i - rest_j))
    return tl.where((j <= i) & (j >= first), decayed, float("-inf"))


@triton.jit(do_not_specialize=["T"])
def by_queries(
    q, k, v,  # [B,T,H,D], [B,T,H/R,D], [B,T,H/R,V], with strides of tokens
    totals,  # [B,H,3,T]
    first,  # [B,H,T]
    o,  # [B,T,H,V]
    lse,  # [B,H,T]: log2 of the sum of a query's weights
    do,
    delta,  # [B,H,T]: Σ o · do
    late_lse,  # [B,H,T]: lse − F_i + the integer of the tile's first token
    rest_lse,  # [B,H,T]: the remainder of F_i − lse
    dq,
    rows,  # [B,H,T]: the gradient of F_i
    T, scale, qt, kt, vt,
    H: tl.constexpr, R: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, TILE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The outputs of a block of queries; if `do` is there, their gradients instead."""
    blocks = tl.cdiv(T, QUERIES)
    block, head = pair_of(blocks)
    start = (blocks - 1 - block) * QUERIES  # blocks with the most keys run first
    b, h, row = (head // H).to(tl.int64) * T, head % H, head.to(tl.int64) * T
    t = start + tl.arange(0, QUERIES)
    k += b * kt + h // R * D
    v += b * vt + h // R * V
    at_values = (b * H + h) * V
    totals += 3 * row
    query = load_tokens(q + b * qt + h * D, start, qt, T, QUERIES, D, True, DTYPE)
    whole, rest = load_sums(totals, t, T)
    base = tl.load(totals + start)
    since = (whole - base) + rest
    earliest = tl.load(first + row + t, mask=t < T, other=NEVER)
    # keys from `begin` on are seen by some query, those from `full` to `start` by all of them
    begin = tl.load(first + row + start) // KEYS * KEYS
    full = tl.load(first + row + tl.minimum(start + QUERIES, T) - 1)
    full = tl.minimum(tl.cdiv(full, KEYS) * KEYS, start)
    early, late = (full - begin) // KEYS, tl.cdiv(tl.minimum(QUERIES, T - start), KEYS)
    total = tl.zeros([QUERIES], tl.float32)
    if do is None:
        result = tl.zeros([QUERIES, V], tl.float32)
        most = tl.full([QUERIES], float("-inf"), tl.float32)
    else:
        result = tl.zeros([QUERIES, D], tl.float32)
        most = tl.load(lse + row + t, mask=t < T, other=0.0)
        doutput = load_tokens(do + at_values, start, H * V, T, QUERIES, V, True, DTYPE)
        output = load_tokens(o + at_values, start, H * V, T, QUERIES, V, True, tl.float32)
        of_query = tl.sum(output * doutput.to(tl.float32), 1)
        tl.store(delta + row + t, of_query, mask=t < T)
        begins = tl.load(totals + t // TILE * TILE, mask=t < T, other=0.0)
        tl.store(late_lse + row + t, most - ((whole - begins) + rest), mask=t < T)
        tl.store(rest_lse + row + t, rest - most, mask=t < T)
        most -= since
    for MASKED in tl.static_range(2):
        count = early + late if MASKED else (start - full) // KEYS
        if MASKED:
            most += since
        for n in tl.range(0, count, num_stages=1 if MASKED else None):
            at = full + n * KEYS
            if MASKED:
                at = tl.where(n < early, begin, start - early * KEYS) + n * KEYS
            j = at + tl.arange(0, KEYS)
            key = load_tokens(k, at, kt, T, KEYS, D, MASKED, DTYPE)
            value = load_tokens(v, at, vt, T, KEYS, V, MASKED, DTYPE)
            s = tl.dot(query, tl.trans(key)) * (scale * LOG2E)
            if MASKED:
                whole_j, rest_j = load_sums(totals, j, T)
                s = masked_scores(
                    s, t[:, None], earliest[:, None], whole[:, None], rest[:, None], j[None, :], whole_j[None, :],
                    rest_j[None, :],
                )  # fmt: skip
            else:
                end = base - tl.load(totals + at // TILE * TILE + TILE - 1)
                s += (tl.load(totals + 2 * T + j) + end)[None, :]
            if do is None:
                larger = tl.maximum(most, tl.max(s, 1))
                finite = tl.where(larger == float("-inf"), 0.0, larger)  # a query that has not seen any key yet
                p = exp2(s - finite[:, None])
                kept = exp2(most - finite)
                total = total * kept + tl.sum(p, 1)
                result = tl.dot(p.to(DTYPE), value, result * kept[:, None])
                most = larger
            else:
                ds = exp2(s - most[:, None]) * (tl.dot(doutput, tl.trans(value)) - of_query[:, None])
                total += tl.sum(ds, 1)
                result = tl.dot(ds.to(DTYPE), key, result)
    if do is None:
        store_tokens(o + at_values, start, H * V, T, result / total[:, None], QUERIES, V)
        tl.store(lse + row + t, most + tl.log2(total), mask=t < T)
    else:
        store_tokens(dq + (b * H + h) * D, start, H * D, T, result * scale, QUERIES, D)
        tl.store(rows + row + t, total, mask=t < T)


@triton.jit
def queries_that_see(first, key, T):
    """The end of the queries whose first key is not behind this one."""
    low, high = tl.where(tl.load(first + T - 1) <= key, T, key + 1), T
    while low < high:
        middle = (low + high) // 2
        sees = tl.load(first + middle) <= key
        low, high = tl.where(sees, middle + 1, low), tl.where(sees, high, middle)
    return low


@triton.jit(do_not_specialize=["T"])
def by_keys(
    q, k, v, totals, first, do, delta, late_lse, rest_lse,
    dk, dv,  # [B,T,H/R,D], [B,T,H/R,V]
    columns,  # [B,H,T]: the gradient of −F_j
    T, scale, qt, kt, vt,
    H: tl.constexpr, R: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, TILE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The gradients of a block of keys and values, from all of their query heads."""
    SHARED: tl.constexpr = H // R
    block, shared = pair_of(tl.cdiv(T, KEYS))
    start = block * KEYS
    stop, last = start + KEYS, tl.minimum(start + KEYS, T) - 1
    b, g = (shared // SHARED).to(tl.int64) * T, shared % SHARED
    j = start + tl.arange(0, KEYS)
    key = load_tokens(k + b * kt + g * D, start, kt, T, KEYS, D, True, DTYPE)
    value = load_tokens(v + b * vt + g * V, start, vt, T, KEYS, V, True, DTYPE)
    dkey, dvalue = tl.zeros([KEYS, D], tl.float32), tl.zeros([KEYS, V], tl.float32)
    for r in tl.range(0, R):
        h = g * R + r
        row = b * H + h.to(tl.int64) * T
        whole, rest = load_sums(totals + 3 * row, j, T)
        base = tl.load(totals + 3 * row + last)
        since = (base - whole) - rest
        # queries to `full` see all keys of the block, those to `end` see some
        full = tl.maximum(stop, queries_that_see(first + row, start, T) // QUERIES * QUERIES)
        end = queries_that_see(first + row, last, T)
        early, late = tl.cdiv(last + 1 - start, QUERIES), tl.cdiv(tl.maximum(end - full, 0), QUERIES)
        column = tl.zeros([KEYS], tl.float32)
        for MASKED in tl.static_range(2):
            count = early + late if MASKED else (full - stop) // QUERIES
            for n in tl.range(0, count, num_stages=1 if MASKED else None):
                at = stop + n * QUERIES
                if MASKED:
                    at = tl.where(n < early, start, full - early * QUERIES) + n * QUERIES
                t = at + tl.arange(0, QUERIES)
                query = load_tokens(q + b * qt + h * D, at, qt, T, QUERIES, D, MASKED, DTYPE)
                doutput = load_tokens(do + (b * H + h) * V, at, H * V, T, QUERIES, V, MASKED, DTYPE)
                of_query = tl.load(delta + row + t, mask=t < T, other=0.0)
                s = tl.dot(key, tl.trans(query)) * (scale * LOG2E)
                if MASKED:
                    earliest = tl.load(first + row + t, mask=t < T, other=NEVER)
                    whole_i = tl.load(totals + 3 * row + t, mask=t < T, other=0.0)
                    rest_i = tl.load(rest_lse + row + t, mask=t < T, other=0.0)
                    s = masked_scores(
                        s, t[None, :], earliest[None, :], whole_i[None, :], rest_i[None, :], j[:, None],
                        whole[:, None], rest[:, None],
                    )  # fmt: skip
                else:
                    shift = tl.load(late_lse + row + t) + (base - tl.load(totals + 3 * row + at // TILE * TILE))
                    s = (s + since[:, None]) - shift[None, :]
                p = exp2(s)
                dvalue = tl.dot(p.to(DTYPE), doutput, dvalue)
                ds = p * (tl.dot(value, tl.trans(doutput)) - of_query[None, :])
                column += tl.sum(ds, 1)
                dkey = tl.dot(ds.to(DTYPE), query, dkey)
        tl.store(columns + row + j, column, mask=j < T)
    store_tokens(dk + (b * SHARED + g) * D, start, SHARED * D, T, dkey * scale, KEYS, D)
    store_tokens(dv + (b * SHARED + g) * V, start, SHARED * V, T, dvalue, KEYS, V)
