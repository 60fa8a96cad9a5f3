"""Attention with log decays and its gradients, in blocks of queries and keys as in FlashAttention-2.

A score is q_i·k_j·scale + F_i − F_j, where F sums the log decays, in log2 units. F is stored as an integer of
32 bits and a remainder in [0, 1), so that differences keep all digits. Blocks that need a mask take these differences
for each pair. In all others, no key is later than a token `base`, and no query is earlier:
F_base − F_j is a number of each key, and F_i − F_base one of each query, which is left out of its scores and of their
maximum.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from ...gpu.tiles import LOG2E, exp2, pair_of


@triton.jit
def load_tokens(x, start, stride, T, ROWS: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr, DTYPE: tl.constexpr):
    """Load [ROWS,D] from token `start` on. With MASKED, tokens from T on are zeros; other calls may not reach them."""
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
def load_four(x, t, T, ROWS: tl.constexpr):
    """Four numbers of each token: a table of one number would be loaded in the layout of a product, many times over."""
    at = x + t[:, None] * 4 + tl.arange(0, 4)[None, :]
    pairs = tl.reshape(tl.load(at, mask=(t < T)[:, None], other=0.0), [ROWS, 2, 2])
    even, odd = tl.split(pairs)
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def first_key(tokens, t):
    return tl.load(tokens + t * 4 + 2).to(tl.int32)


@triton.jit
def integer(x):
    """The integer whose bits a table has."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def masked_scores(scaled, i, first, whole_i, rest_i, j, whole_j, rest_j):
    decayed = scaled + ((whole_i - whole_j).to(tl.float32) + (rest_i - rest_j))
    return tl.where((j <= i) & (j >= first), decayed, float("-inf"))


@triton.jit(do_not_specialize=["T"])
def by_queries(
    q, k, v,  # [B,T,H,D], [B,T,H/R,D], [B,T,H/R,V], with strides of tokens
    tokens,  # [B,H,T,4], as `sum_decays` fills it
    o,  # [B,T,H,V]
    lse,  # [B,H,T]: log2 of the sum of a query's weights
    do,
    of_queries,  # [B,H,T,4]: like `tokens`, with remainders minus lse, and with Σ o · do
    dq,
    rows,  # [B,H,T]: the gradient of F_i
    T, scale, qt, kt, vt,
    H: tl.constexpr, R: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Write the outputs of a block of queries or, if `do` is not None, the gradients of these queries."""
    blocks = tl.cdiv(T, QUERIES)
    block, head = pair_of(blocks)
    start = (blocks - 1 - block) * QUERIES  # blocks with the most keys run first
    b, h, row = (head // H).to(tl.int64) * T, head % H, head.to(tl.int64) * T
    t = start + tl.arange(0, QUERIES)
    k += b * kt + h // R * D
    v += b * vt + h // R * V
    at_values = (b * H + h) * V
    tokens += 4 * row
    query = load_tokens(q + b * qt + h * D, start, qt, T, QUERIES, D, True, DTYPE)
    bits, rest, earliest, _t = load_four(tokens, t, T, QUERIES)
    whole, base = integer(bits), integer(tl.load(tokens + start * 4))
    since = (whole - base).to(tl.float32) + rest
    earliest = tl.where(t < T, earliest.to(tl.int32), T)
    # keys from `begin` on are seen by some query, those from `full` to `start` by all of them
    begin = first_key(tokens, start) // KEYS * KEYS
    full = tl.minimum(tl.cdiv(first_key(tokens, tl.minimum(start + QUERIES, T) - 1), KEYS) * KEYS, start)
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
        delta = tl.sum(output * doutput.to(tl.float32), 1)
        of_queries += (row + t) * 4
        tl.store(of_queries, bits, mask=t < T)
        tl.store(of_queries + 1, rest - most, mask=t < T)
        tl.store(of_queries + 2, earliest.to(tl.float32), mask=t < T)
        tl.store(of_queries + 3, delta, mask=t < T)
    for MASKED in tl.static_range(2):
        count = early + late if MASKED else (start - full) // KEYS
        shift = since
        if do is not None:
            shift = most if MASKED else most - since
        elif MASKED:
            most += since
        for n in tl.range(0, count, num_stages=1 if MASKED else None):
            at = full + n * KEYS
            if MASKED:
                at = tl.where(n < early, begin, start - early * KEYS) + n * KEYS
            j = at + tl.arange(0, KEYS)
            key = load_tokens(k, at, kt, T, KEYS, D, MASKED, DTYPE)
            value = load_tokens(v, at, vt, T, KEYS, V, MASKED, DTYPE)
            bits_j, rest_j, _first_j, _j = load_four(tokens, j, T, KEYS)
            whole_j = integer(bits_j)
            s = tl.dot(query, tl.trans(key)) * (scale * LOG2E)
            if MASKED:
                s = masked_scores(
                    s, t[:, None], earliest[:, None], whole[:, None], rest[:, None], j[None, :], whole_j[None, :],
                    rest_j[None, :],
                )  # fmt: skip
            else:
                s += ((base - whole_j).to(tl.float32) - rest_j)[None, :]
            if do is None:
                larger = tl.maximum(most, tl.max(s, 1))
                finite = tl.where(larger == float("-inf"), 0.0, larger)  # a query that has not seen any key yet
                p = exp2(s - finite[:, None])
                kept = exp2(most - finite)
                total = total * kept + tl.sum(p, 1)
                result = tl.dot(p.to(DTYPE), value, result * kept[:, None])
                most = larger
            else:
                ds = exp2(s - shift[:, None]) * (tl.dot(doutput, tl.trans(value)) - delta[:, None])
                total += tl.sum(ds, 1)
                result = tl.dot(ds.to(DTYPE), key, result)
    if do is None:
        store_tokens(o + at_values, start, H * V, T, result / total[:, None], QUERIES, V)
        tl.store(lse + row + t, most + tl.log2(total), mask=t < T)
    else:
        store_tokens(dq + (b * H + h) * D, start, H * D, T, result * scale, QUERIES, D)
        tl.store(rows + row + t, total, mask=t < T)


@triton.jit
def queries_that_see(tokens, key, T):
    """Return the end of the queries that see a key: no first key is earlier than that of an earlier query."""
    low, high = tl.where(first_key(tokens, T - 1) <= key, T, key + 1), T
    while low < high:
        middle = (low + high) // 2
        sees = first_key(tokens, middle) <= key
        low, high = tl.where(sees, middle + 1, low), tl.where(sees, high, middle)
    return low


@triton.jit(do_not_specialize=["T"])
def by_keys(
    q, k, v, tokens, do, of_queries,
    dk, dv,  # [B,T,H/R,D], [B,T,H/R,V]
    columns,  # [B,H,T]: the gradient of −F_j
    T, scale, qt, kt, vt,
    H: tl.constexpr, R: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a block of keys and values, summed over the query heads that share them."""
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
        bits, rest, _first_j, _j = load_four(tokens + row * 4, j, T, KEYS)
        whole, base = integer(bits), integer(tl.load(tokens + (row + last) * 4))
        since = (base - whole).to(tl.float32) - rest
        # queries to `full` see all keys of the block, those to `end` see some
        full = tl.maximum(stop, queries_that_see(tokens + row * 4, start, T) // QUERIES * QUERIES)
        end = queries_that_see(tokens + row * 4, last, T)
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
                bits_i, rest_i, earliest, delta = load_four(of_queries + row * 4, t, T, QUERIES)
                whole_i = integer(bits_i)
                s = tl.dot(key, tl.trans(query)) * (scale * LOG2E)
                if MASKED:
                    earliest = tl.where(t < T, earliest.to(tl.int32), T)
                    s = masked_scores(
                        s, t[None, :], earliest[None, :], whole_i[None, :], rest_i[None, :], j[:, None],
                        whole[:, None], rest[:, None],
                    )  # fmt: skip
                else:
                    s = (s + since[:, None]) + ((whole_i - base).to(tl.float32) + rest_i)[None, :]
                p = exp2(s)
                dvalue = tl.dot(p.to(DTYPE), doutput, dvalue)
                ds = p * (tl.dot(value, tl.trans(doutput)) - delta[None, :])
                column += tl.sum(ds, 1)
                dkey = tl.dot(ds.to(DTYPE), query, dkey)
        tl.store(columns + row + j, column, mask=j < T)
    store_tokens(dk + (b * SHARED + g) * D, start, SHARED * D, T, dkey * scale, KEYS, D)
    store_tokens(dv + (b * SHARED + g) * V, start, SHARED * V, T, dvalue, KEYS, V)
