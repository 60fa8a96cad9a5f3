"""Decays per key channel in one pass over the chunks of a sequence, on Hopper: outputs, states, or all gradients.

With b the log decays of a chunk summed from its start, and per channel two reference points r and s:

    Q' = Q e^{b − r}     K' = K e^{s − b}     S' = e^r S     dS' = e^{b_C − s} dS

    forward    O = Q' S' + lower(Q' K'ᵀ) V          S ← e^{b_C − s} (e^{s − r} S' + K'ᵀ V)
    backward   D = lower(dO Vᵀ)                     dV = lower(Q' K'ᵀ)ᵀ dO + K' dS'
               dQ = e^{b − r} ⊙ (dO S'ᵀ + D K')     dK = e^{s − b} ⊙ (V dS'ᵀ + Dᵀ Q')
               dS ← e^r (e^{s − r} dS' + Q'ᵀ dO)

Both reference points are b in the middle of the chunk, so that Q' K'ᵀ has the decays between its tokens, rounded to a
whole number of powers of two: so a row, which they may look ahead of, has the same bits with any of them. Where a decay
from there to an end of the chunk is too strong for the exponent of a factor (a steep channel), s is b_C or lower: what
passes through the state is right, and what the channel adds to Q' K'ᵀ is nothing. Then the forward pass takes other
keys for the rows that the reference point r still serves, which depends on the decays up to the row, and zeros as
queries from the first other row on, which it stores. Two kernels add what is left out (`vector_decay_exact.py`).

A program has a whole state [K,128], K = 64 or 128, in the registers of eight warps. Sums of decays from the start of a
chunk are products with the lower triangle of ones: of decays in bf16 as they are, of those in fp32 in two parts of 8
bits. The states S' before all chunks, which the gradients need, are stored with the outputs or computed again. In the
gradient pass, the loads of a chunk are issued as soon as the chunk before has read a buffer for the last time.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ...gpu.gluon_tiles import (
    COPY,
    FLAT,
    NARROW_COPY,
    NARROW_OCTETS,
    OCTETS,
    OF_COLUMNS,
    OF_ROWS,
    PAIRS,
    ROWS,
    SHARED,
    STATE,
    async_load,
    at_tile,
    barrier,
    copy_state,
    copy_tokens,
    distance,
    in_states,
    key_head_of,
    opaque,
    reinterpret,
    segment_of,
    store_rows,
)

LOG2E = gl.constexpr(1.4426950408889634)
LEAST = gl.constexpr(-152.0)  # as in `tiles.py`
LEAST_NARROW = gl.constexpr(-106.0)  # the same for decays in bf16, which stay natural logarithms until they are summed
SAFE = gl.constexpr(100.0)  # as in `vector_decay.py`
# Added to sums of decays above −240, it leaves 15 binary places, which whole numbers neither shift nor round.
GRID = gl.constexpr(511.0)
COPY_DECAYS = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [8, 1], [1, 0]))
COPY_FEW_DECAYS = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [8, 1], [1, 0]))  # of 64 channels
COLUMNS = gl.constexpr(gl.BlockedLayout([32, 1], [1, 32], [2, 4], [0, 1]))  # half a column a thread
DECAYS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
EACH_THREAD = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
EACH_WARP = gl.constexpr(gl.BlockedLayout([4], [32], [8], [0]))  # 128 numbers in every warp


@gluon.jit
def as_narrow(decays, K: gl.constexpr):
    """The first half of memory for a tile in fp32, for one in bf16."""
    return reinterpret(decays, gl.bfloat16, [64, K], SHARED)


@gluon.jit
def copy_keys(shared, x, token, column, stop, stride: gl.constexpr, K: gl.constexpr):
    """Start to copy a tile [64, K] in bf16; zeros from token `stop` on."""
    LAYOUT: gl.constexpr = COPY if K == 128 else NARROW_COPY
    copy_tokens(shared, x, token, column, stop, stride, LAYOUT=LAYOUT, C=K)


@gluon.jit
def copy_decays(shared, x, token, column, stop, stride: gl.constexpr, K: gl.constexpr):
    """Start to copy a tile [64, K] in fp32 or bf16; zeros from token `stop` on."""
    if x.dtype.element_ty == gl.bfloat16:
        copy_keys(as_narrow(shared, K), x, token, column, stop, stride, K)
    else:
        LAYOUT: gl.constexpr = COPY_DECAYS if K == 128 else COPY_FEW_DECAYS
        r = gl.expand_dims(opaque(gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))), 1)
        at = at_tile(x, token, column, stride, LAYOUT, 64, K)
        async_load(shared, at, mask=r < stop - token)


@gluon.jit
def copy_ends(shared, x, place, wanted, K: gl.constexpr):
    """Start to copy the sums of both halves of a chunk, 2K numbers; each thread one."""
    at = gl.arange(0, 2 * K, gl.BlockedLayout([1], [32], [8], [0]))
    async_load(shared, x + (place * (2 * K) + at), mask=(at >= 0) & wanted)


@gluon.jit
def in_log2(g):
    return gl.maximum(g * LOG2E, LEAST)


@gluon.jit
def bounded(decays, NARROW: gl.constexpr, K: gl.constexpr):
    """Decays as `split` stores them: bounded, and in log2 if they are in fp32."""
    KEYS: gl.constexpr = ROWS if K == 128 else PAIRS
    if NARROW:
        g = gl.maximum(as_narrow(decays, K).load(KEYS).to(gl.float32), LEAST_NARROW)
    else:
        g = in_log2(decays.load(KEYS))
    return g


@gluon.jit
def split(decays, g, NARROW: gl.constexpr, K: gl.constexpr):
    """Store g as the sum of two tiles in bf16, or as one, for `from_start`."""
    high = g.to(gl.bfloat16)
    if NARROW:
        as_narrow(decays, K).store(high)
    else:
        parts = reinterpret(decays, gl.bfloat16, [2, 64, K], SHARED)
        parts.index(0).store(high)
        parts.index(1).store((g - high.to(gl.float32)).to(gl.bfloat16))


@gluon.jit
def from_start(lower, decays, zeros, NARROW: gl.constexpr, K: gl.constexpr):
    """Start to compute the sums of decays from the start of a chunk."""
    if NARROW:
        b = warpgroup_mma(lower, as_narrow(decays, K), zeros, use_acc=False, is_async=True)
    else:
        parts = reinterpret(decays, gl.bfloat16, [2, 64, K], SHARED)
        b = warpgroup_mma(lower, parts.index(0), zeros, use_acc=False, is_async=True)
        b = warpgroup_mma(lower, parts.index(1), b, is_async=True)
    return b


@gluon.jit
def waited(b, NARROW: gl.constexpr):
    """The sums that were started, in log2, plus `GRID`."""
    b = warpgroup_mma_wait(0, deps=[b])
    if NARROW:
        b *= LOG2E
    return b + GRID


@gluon.jit
def store_points(points, ends, K: gl.constexpr):
    """Store the reference points r and s of a chunk, plus `GRID`.

    r is below all sums of the first half that it serves. On a GPU, 2^x has the same digits for all x of one fraction
    and sign, but may have others for the other sign.
    """
    early, late = ends.slice(0, K).load(EACH_THREAD), ends.slice(K, K).load(EACH_THREAD)
    enter = gl.maximum(gl.floor(early) - 1.0, -SAFE - 2.0)
    steep = gl.maximum(-early, -late) > SAFE
    points.slice(0, K).store(GRID + enter)
    points.slice(K, K).store(GRID + gl.where(steep, gl.minimum(early + late, enter - SAFE), enter))


@gluon.jit
def load_points(points, LAYOUT: gl.constexpr, K: gl.constexpr):
    """r and s, plus `GRID`, as the sums have it."""
    return points.slice(0, K).load(LAYOUT), points.slice(K, K).load(LAYOUT)


@gluon.jit
def of_state(points, ends, OF_STATE: gl.constexpr, K: gl.constexpr):
    """The exponents of three factors of a state: before it enters the products of a chunk, in them, and afterwards."""
    enter, leave = load_points(points, OF_STATE, K)
    total = ends.slice(0, K).load(OF_STATE) + ends.slice(K, K).load(OF_STATE)
    return enter - GRID, leave - enter, total - (leave - GRID)


@gluon.jit
def any_steep(points, K: gl.constexpr):
    """1 for a chunk with a steep channel, 0 for others."""
    enter, leave = load_points(points, EACH_WARP, K)
    return gl.max((enter != leave).to(gl.int32), 0)


@gluon.jit
def prepare_steep(queries, scored, k, count, points, b, left_out, k_token: gl.constexpr, K: gl.constexpr):
    """Zeros for queries that r does not serve, and keys for the scores of the others.

    In each channel these are the rows from the first one on, stored in `left_out`, with a decay from r that is too
    strong; no later row has a say. The limit is beyond that of steep channels, which is of sums in another order: other
    channels have no such row.
    """
    KEYS: gl.constexpr = ROWS if K == 128 else PAIRS
    OF_CHANNELS: gl.constexpr = gl.SliceLayout(0, KEYS)
    enter, _ = load_points(points, OF_CHANNELS, K)
    r = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, KEYS)), 1)
    reach = b - gl.where(r < 32, GRID, gl.expand_dims(enter, 0))
    first = gl.min(gl.where(reach < -SAFE - 1.0, r, 64), 0)
    gl.store(left_out + gl.arange(0, K, OF_CHANNELS), first.to(gl.int8))
    queries.store(gl.where(r < gl.expand_dims(first, 0), queries.load(KEYS), 0.0).to(gl.bfloat16))
    keys = gl.load(at_tile(k, 0, 0, k_token, KEYS, 64, K), mask=r < count, other=0.0)
    down = gl.exp2(gl.minimum(gl.expand_dims(enter, 0) - b, SAFE + 3.0))
    scored.store((keys.to(gl.float32) * down).to(gl.bfloat16))


@gluon.jit
def sums_of_halves(shared, decays, out, NARROW: gl.constexpr, K: gl.constexpr):
    """Sum the decays of a chunk over each half of its tokens, into shared memory and, if wanted, to `out`."""
    if NARROW:
        g = gl.maximum(as_narrow(decays, K).load(COLUMNS).to(gl.float32), LEAST_NARROW) * LOG2E
    else:
        g = in_log2(decays.load(COLUMNS))
    halves = gl.sum(gl.reshape(g, [2, 32, K]), 1)
    OUT: gl.constexpr = halves.type.layout
    if out is not None:
        half = gl.expand_dims(gl.arange(0, 2, gl.SliceLayout(1, OUT)) * K, 1)
        gl.store(out + (half + gl.expand_dims(gl.arange(0, K, gl.SliceLayout(0, OUT)), 0)), halves)
    shared.store(gl.reshape(halves, [2 * K]))


@gluon.jit
def lower_triangle(shared):
    """Store ones on and below the diagonal."""
    shared.store((distance() >= 0).to(gl.bfloat16))


@gluon.jit(do_not_specialize=["chunks", "groups"])
def outputs(
    q,
    k,
    v,
    log_decay,
    out,
    into,
    ends,
    left_out,
    first,
    last,
    segments,
    scale,
    q_head,
    k_head,
    v_head,
    chunks,
    groups,
    q_token: gl.constexpr,
    k_token: gl.constexpr,
    v_token: gl.constexpr,
    heads: gl.constexpr,
    SUBHEADS: gl.constexpr,
    K: gl.constexpr,
):
    NARROW: gl.constexpr = log_decay.dtype.element_ty == gl.bfloat16
    KEYS: gl.constexpr = ROWS if K == 128 else PAIRS  # layout of a tile [64, K]
    STATES: gl.constexpr = STATE if K == 128 else ROWS
    OF_STATE: gl.constexpr = gl.SliceLayout(1, STATES)
    OF_CHANNELS: gl.constexpr = gl.SliceLayout(0, KEYS)
    n, start, stop, first_chunk, state = segment_of(segments, heads)
    place = n.to(gl.int64) * chunks + first_chunk
    value_head = n // SUBHEADS
    key_head = key_head_of(n, groups, SUBHEADS)
    q += key_head.to(gl.int64) * q_head
    k += key_head.to(gl.int64) * k_head
    v += value_head.to(gl.int64) * v_head
    count = gl.cdiv(stop - start, 64)

    queries_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, K], SHARED)
    keys_s = gl.allocate_shared_memory(gl.bfloat16, [3, 64, K], SHARED)  # the last one for steep chunks
    values_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 128], SHARED)
    decays_s = gl.allocate_shared_memory(gl.float32, [2, 64, K], DECAYS)
    state_s = gl.allocate_shared_memory(gl.bfloat16, [K, 128], SHARED)
    lower_s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    ends_s = gl.allocate_shared_memory(gl.float32, [2 * K], FLAT)
    points_s = gl.allocate_shared_memory(gl.float32, [2 * K], FLAT)

    offsets = in_states(state, n, heads, STATES, K)
    S = gl.zeros([K, 128], gl.float32, STATES)
    if first is not None:
        S = gl.load(first + offsets)
    lower_triangle(lower_s)
    rows, pairs = gl.zeros([64, 128], gl.float32, ROWS), gl.zeros([64, 64], gl.float32, PAIRS)
    channels = rows if K == 128 else gl.zeros([64, K], gl.float32, KEYS)
    lower = gl.expand_dims(gl.arange(0, 64, OF_ROWS), 1) >= gl.expand_dims(gl.arange(0, 64, OF_COLUMNS), 0)
    if count > 0:
        copy_decays(decays_s.index(0), log_decay, start, n * K, stop, heads * K, K)
        copy_keys(queries_s.index(0), q, start, 0, stop, q_token, K)
        copy_keys(keys_s.index(0), k, start, 0, stop, k_token, K)
        copy_tokens(values_s.index(0), v, start, 0, stop, v_token)
    async_copy.commit_group()
    for i in range(count):
        token = start + i * 64
        queries, keys, values = queries_s.index(i % 2), keys_s.index(i % 2), values_s.index(i % 2)
        decays = decays_s.index(i % 2)
        async_copy.wait_group(0)
        barrier()
        if i + 1 < count:
            copy_decays(decays_s.index((i + 1) % 2), log_decay, token + 64, n * K, stop, heads * K, K)
            copy_keys(queries_s.index((i + 1) % 2), q, token + 64, 0, stop, q_token, K)
            copy_keys(keys_s.index((i + 1) % 2), k, token + 64, 0, stop, k_token, K)
            copy_tokens(values_s.index((i + 1) % 2), v, token + 64, 0, stop, v_token)
        async_copy.commit_group()
        sums_of_halves(ends_s, decays, ends + (place + i) * (2 * K), NARROW, K)
        g = bounded(decays, NARROW, K)
        barrier()
        store_points(points_s, ends_s, K)
        split(decays, g, NARROW, K)
        fence_async_shared()
        barrier()
        b = from_start(lower_s, decays, channels, NARROW, K)
        before, within, after = of_state(points_s, ends_s, OF_STATE, K)
        S *= gl.expand_dims(gl.exp2(before), 1)
        state_s.store(S.to(gl.bfloat16))
        S *= gl.expand_dims(gl.exp2(within), 1)
        rest = gl.exp2(after)
        b = waited(b, NARROW)
        enter, leave = load_points(points_s, OF_CHANNELS, K)
        up, down = gl.exp2(b - gl.expand_dims(enter, 0)), gl.exp2(gl.expand_dims(leave, 0) - b)
        queries.store((queries.load(KEYS).to(gl.float32) * (up * scale)).to(gl.bfloat16))
        keys.store((keys.load(KEYS).to(gl.float32) * down).to(gl.bfloat16))
        steep = any_steep(points_s, K)
        if steep != 0:
            keys_at, rows_at = k + token.to(gl.int64) * k_token, left_out + (place + i) * K
            prepare_steep(queries, keys_s.index(2), keys_at, stop - token, points_s, b, rows_at, k_token, K)
        scored = keys_s.index(gl.where(steep != 0, 2, i % 2))
        fence_async_shared()
        barrier()
        A = warpgroup_mma(queries, scored.permute((1, 0)), pairs, use_acc=False, is_async=True)
        O = warpgroup_mma(queries, state_s, rows, use_acc=False, is_async=True)
        S = warpgroup_mma(keys.permute((1, 0)), values, S, is_async=True)
        A = warpgroup_mma_wait(2, deps=[A])
        scores_s = reinterpret(decays, gl.bfloat16, [64, 64], SHARED)  # the sums have been read
        scores_s.store(gl.where(lower, A, 0.0).to(gl.bfloat16))
        fence_async_shared()
        barrier()
        O = warpgroup_mma(scores_s, values, O, is_async=True)
        if into is not None:
            at = at_tile(into, ((first_chunk + i).to(gl.int64) * heads + n) * K, 0, 128, COPY, K, 128)
            gl.store(at, state_s.load(COPY))
        S = warpgroup_mma_wait(1, deps=[S])
        S *= gl.expand_dims(rest, 1)
        O = warpgroup_mma_wait(0, deps=[O])
        store_rows(out, token, n * 128, stop, heads * 128, O)
    if last is not None:
        gl.store(last + offsets, S)


@gluon.jit(do_not_specialize=["chunks", "groups"])
def states(
    x,
    y,
    log_decay,
    into,
    ends,
    first,
    last,
    shrunk,
    segments,
    scale,
    x_head,
    y_head,
    chunks,
    groups,
    x_token: gl.constexpr,
    y_token: gl.constexpr,
    heads: gl.constexpr,
    SUBHEADS: gl.constexpr,
    K: gl.constexpr,
    REVERSE: gl.constexpr,
):
    NARROW: gl.constexpr = log_decay.dtype.element_ty == gl.bfloat16
    KEYS: gl.constexpr = ROWS if K == 128 else PAIRS  # layout of a tile [64, K]
    STATES: gl.constexpr = STATE if K == 128 else ROWS
    OF_STATE: gl.constexpr = gl.SliceLayout(1, STATES)
    OF_CHANNELS: gl.constexpr = gl.SliceLayout(0, KEYS)
    n, start, stop, first_chunk, state = segment_of(segments, heads)
    place = n.to(gl.int64) * chunks + first_chunk
    value_head = n // SUBHEADS
    key_head = key_head_of(n, groups, SUBHEADS)
    x += key_head.to(gl.int64) * x_head
    y += value_head.to(gl.int64) * y_head
    count = gl.cdiv(stop - start, 64)

    x_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, K], SHARED)
    y_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 128], SHARED)
    decays_s = gl.allocate_shared_memory(gl.float32, [2, 64, K], DECAYS)
    state_s = gl.allocate_shared_memory(gl.bfloat16, [K, 128], SHARED)
    lower_s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    ends_s = gl.allocate_shared_memory(gl.float32, [2 * K], FLAT)
    points_s = gl.allocate_shared_memory(gl.float32, [2 * K], FLAT)

    offsets = in_states(state, n, heads, STATES, K)
    S = gl.zeros([K, 128], gl.float32, STATES)
    if first is not None:
        S = gl.load(first + offsets)
    survives = gl.zeros([K], gl.float32, OF_STATE)
    lower_triangle(lower_s)
    channels = gl.zeros([64, K], gl.float32, KEYS)
    if count > 0:
        token = start + (count - 1) * 64 if REVERSE else start
        copy_decays(decays_s.index(0), log_decay, token, n * K, stop, heads * K, K)
        copy_keys(x_s.index(0), x, token, 0, stop, x_token, K)
        copy_tokens(y_s.index(0), y, token, 0, stop, y_token)
    async_copy.commit_group()
    for i in range(count):
        c = count - 1 - i if REVERSE else i
        token = start + (c - 1 if REVERSE else c + 1) * 64  # of the chunk after this one, in either direction
        xs, ys, decays = x_s.index(i % 2), y_s.index(i % 2), decays_s.index(i % 2)
        async_copy.wait_group(0)
        barrier()
        end = gl.where(i + 1 < count, stop, token)
        copy_decays(decays_s.index((i + 1) % 2), log_decay, token, n * K, end, heads * K, K)
        copy_keys(x_s.index((i + 1) % 2), x, token, 0, end, x_token, K)
        copy_tokens(y_s.index((i + 1) % 2), y, token, 0, end, y_token)
        async_copy.commit_group()
        sums_of_halves(ends_s, decays, None if into is None else ends + (place + c) * (2 * K), NARROW, K)
        g = bounded(decays, NARROW, K)
        barrier()
        store_points(points_s, ends_s, K)
        split(decays, g, NARROW, K)
        fence_async_shared()
        barrier()
        b = from_start(lower_s, decays, channels, NARROW, K)
        before, within, after = of_state(points_s, ends_s, OF_STATE, K)
        survives += before + within + after
        S *= gl.expand_dims(gl.exp2(after if REVERSE else before), 1)
        if into is not None:
            state_s.store(S.to(gl.bfloat16))
        S *= gl.expand_dims(gl.exp2(within), 1)
        rest = gl.exp2(before if REVERSE else after)
        enter, leave = load_points(points_s, OF_CHANNELS, K)
        b = waited(b, NARROW)
        factor = gl.exp2(b - gl.expand_dims(enter, 0)) * scale if REVERSE else gl.exp2(gl.expand_dims(leave, 0) - b)
        xs.store((xs.load(KEYS).to(gl.float32) * factor).to(gl.bfloat16))
        fence_async_shared()
        barrier()
        S = warpgroup_mma(xs.permute((1, 0)), ys, S, is_async=True)
        if into is not None:
            at = at_tile(into, ((first_chunk + c).to(gl.int64) * heads + n) * K, 0, 128, COPY, K, 128)
            gl.store(at, state_s.load(COPY))
        S = warpgroup_mma_wait(0, deps=[S])
        S *= gl.expand_dims(rest, 1)
    if last is not None:
        gl.store(last + offsets, S)
    if shrunk is not None:
        at = gl.program_id(0).to(gl.int64) * K + gl.arange(0, K, OF_STATE)
        gl.store(shrunk + at, gl.exp2(survives))


@gluon.jit(do_not_specialize=["chunks", "groups"])
def gradients(
    q,
    k,
    v,
    grad,
    log_decay,
    states,
    ends,
    q_grad,
    k_grad,
    v_grad,
    log_decay_grad,
    last,
    first,
    segments,
    scale,
    q_head,
    k_head,
    v_head,
    grad_head,
    chunks,
    groups,
    q_token: gl.constexpr,
    k_token: gl.constexpr,
    v_token: gl.constexpr,
    grad_token: gl.constexpr,
    heads: gl.constexpr,
    SUBHEADS: gl.constexpr,
    K: gl.constexpr,
):
    NARROW: gl.constexpr = log_decay.dtype.element_ty == gl.bfloat16
    KEYS: gl.constexpr = ROWS if K == 128 else PAIRS  # layout of a tile [64, K]
    STATES: gl.constexpr = STATE if K == 128 else ROWS
    OF_STATE: gl.constexpr = gl.SliceLayout(1, STATES)
    OF_CHANNELS: gl.constexpr = gl.SliceLayout(0, KEYS)
    OF_TOKENS: gl.constexpr = gl.SliceLayout(1, KEYS)
    STORE: gl.constexpr = OCTETS if K == 128 else NARROW_OCTETS
    n, start, stop, first_chunk, state = segment_of(segments, heads)
    place = n.to(gl.int64) * chunks + first_chunk
    value_head = n // SUBHEADS
    key_head = key_head_of(n, groups, SUBHEADS)
    q += key_head.to(gl.int64) * q_head
    k += key_head.to(gl.int64) * k_head
    v += value_head.to(gl.int64) * v_head
    grad += value_head.to(gl.int64) * grad_head
    count = gl.cdiv(stop - start, 64)

    queries_s = gl.allocate_shared_memory(gl.bfloat16, [64, K], SHARED)  # then what goes into the gradient of b
    keys_s = gl.allocate_shared_memory(gl.bfloat16, [64, K], SHARED)  # likewise
    values_s = gl.allocate_shared_memory(gl.bfloat16, [64, 128], SHARED)
    grad_s = gl.allocate_shared_memory(gl.bfloat16, [64, 128], SHARED)
    decays_s = gl.allocate_shared_memory(gl.float32, [64, K], DECAYS)
    before_s = gl.allocate_shared_memory(gl.bfloat16, [K, 128], SHARED)
    after_s = gl.allocate_shared_memory(gl.bfloat16, [K, 128], SHARED)
    enter_s = gl.allocate_shared_memory(gl.bfloat16, [64, K], SHARED)
    leave_s = gl.allocate_shared_memory(gl.bfloat16, [64, K], SHARED)
    pairs_s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    scores_s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    lower_s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    ends_s = gl.allocate_shared_memory(gl.float32, [2 * K], FLAT)
    points_s = gl.allocate_shared_memory(gl.float32, [2 * K], FLAT)
    through_s = gl.allocate_shared_memory(gl.float32, [K], FLAT)
    itself_s = gl.allocate_shared_memory(gl.float32, [64], FLAT)

    offsets = in_states(state, n, heads, STATES, K)
    dS = gl.zeros([K, 128], gl.float32, STATES)
    if last is not None:
        dS = gl.load(last + offsets)
    rows, pairs = gl.zeros([64, 128], gl.float32, ROWS), gl.zeros([64, 64], gl.float32, PAIRS)
    channels = rows if K == 128 else gl.zeros([64, K], gl.float32, KEYS)
    lower_triangle(lower_s)
    if count > 0:
        token, c = start + (count - 1) * 64, count - 1
        copy_decays(decays_s, log_decay, token, n * K, stop, heads * K, K)
        copy_ends(ends_s, ends, place + c, True, K)
        copy_tokens(values_s, v, token, 0, stop, v_token)
        copy_state(before_s, states, (first_chunk + c).to(gl.int64) * heads + n, True, K)
        async_copy.commit_group()
        copy_keys(queries_s, q, token, 0, stop, q_token, K)
        copy_keys(keys_s, k, token, 0, stop, k_token, K)
        async_copy.commit_group()
    for i in range(count):
        c = count - 1 - i
        token = start + c * 64
        async_copy.wait_group(1)
        barrier()
        copy_tokens(grad_s, grad, token, 0, stop, grad_token)
        async_copy.commit_group()
        g = bounded(decays_s, NARROW, K)
        store_points(points_s, ends_s, K)
        barrier()
        before, within, after = of_state(points_s, ends_s, OF_STATE, K)
        dS *= gl.expand_dims(gl.exp2(after), 1)
        after_s.store(dS.to(gl.bfloat16))
        split(decays_s, g, NARROW, K)
        fence_async_shared()
        barrier()
        b = from_start(lower_s, decays_s, channels, NARROW, K)
        if log_decay_grad is not None:
            through_s.store(gl.sum(before_s.load(STATES).to(gl.float32) * dS, 1) * gl.exp2(within))
        dS *= gl.expand_dims(gl.exp2(within), 1)
        rest = gl.exp2(before)
        async_copy.wait_group(1)
        b = waited(b, NARROW)
        barrier()
        decays_s.store(b)  # it does not fit into registers until it is needed again
        enter, leave = load_points(points_s, OF_CHANNELS, K)
        up, down = gl.exp2(b - gl.expand_dims(enter, 0)) * scale, gl.exp2(gl.expand_dims(leave, 0) - b)
        enter_s.store((queries_s.load(KEYS).to(gl.float32) * up).to(gl.bfloat16))
        leave_s.store((keys_s.load(KEYS).to(gl.float32) * down).to(gl.bfloat16))
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        D = warpgroup_mma(grad_s, values_s.permute((1, 0)), pairs, use_acc=False, is_async=True)
        A = warpgroup_mma(enter_s, leave_s.permute((1, 0)), pairs, use_acc=False, is_async=True)
        dQ = warpgroup_mma(grad_s, before_s.permute((1, 0)), channels, use_acc=False, is_async=True)
        # a token paired with itself does not decay: these pairs stay out of the terms that have to cancel
        itself_s.store(gl.sum(grad_s.load(COPY).to(gl.float32) * values_s.load(COPY).to(gl.float32), 1) * scale)
        D, A = warpgroup_mma_wait(1, deps=[D, A])
        pairs_s.store(gl.where(distance() > 0, D, 0.0).to(gl.bfloat16))
        scores_s.store(gl.where(distance() >= 0, A, 0.0).to(gl.bfloat16))
        fence_async_shared()
        barrier()
        dQ = warpgroup_mma(pairs_s, leave_s, dQ, is_async=True)
        dK = warpgroup_mma(pairs_s.permute((1, 0)), enter_s, channels, use_acc=False, is_async=True)
        dQ = warpgroup_mma_wait(1, deps=[dQ])
        itself = gl.expand_dims(itself_s.load(OF_TOKENS), 1)
        # b is loaded for each use, and the gradient of q stored before that of k is needed: registers are short here
        if log_decay_grad is not None:
            # Later tokens reach back past this one, earlier ones forward. Pairs of two later tokens cancel in the sum
            # of both, so both take the factors as the products took them, rounded to bf16.
            past = enter_s.load(KEYS).to(gl.float32) * dQ
        dQ *= gl.exp2(decays_s.load(KEYS) - gl.expand_dims(load_points(points_s, OF_CHANNELS, K)[0], 0)) * scale
        dQ += itself * keys_s.load(KEYS).to(gl.float32)
        store_rows(q_grad, token, n * K, stop, heads * K, dQ, LAYOUT=STORE)
        dK = warpgroup_mma_wait(0, deps=[dK])
        if log_decay_grad is not None:
            past -= leave_s.load(KEYS).to(gl.float32) * dK
        dK *= gl.exp2(gl.expand_dims(load_points(points_s, OF_CHANNELS, K)[1], 0) - decays_s.load(KEYS))
        dK += itself * queries_s.load(KEYS).to(gl.float32)
        if log_decay_grad is not None:
            queries_s.store(past.to(gl.bfloat16))
        keys = keys_s.load(KEYS).to(gl.float32)
        T = warpgroup_mma(values_s, after_s.permute((1, 0)), channels, use_acc=False, is_async=True)
        _, leave = load_points(points_s, OF_CHANNELS, K)
        down = gl.exp2(gl.expand_dims(leave, 0) - decays_s.load(KEYS))
        T = warpgroup_mma_wait(0, deps=[T])
        T *= down
        if log_decay_grad is not None:
            keys_s.store((keys * T).to(gl.bfloat16))
        store_rows(k_grad, token, n * K, stop, heads * K, dK + T, LAYOUT=STORE)
        fence_async_shared()
        barrier()
        if log_decay_grad is not None:
            dg = warpgroup_mma(lower_s, keys_s, channels, use_acc=False, is_async=True)
            dg = warpgroup_mma(lower_s.permute((1, 0)), queries_s, dg, is_async=True)
        dS = warpgroup_mma(enter_s.permute((1, 0)), grad_s, dS, is_async=True)
        dV = warpgroup_mma(leave_s, after_s, rows, use_acc=False, is_async=True)
        dV = warpgroup_mma(scores_s.permute((1, 0)), grad_s, dV, is_async=True)
        # The chunk before; masked rather than skipped, since a branch among products that run would make them wait.
        end = gl.where(c > 0, stop, token - 64)
        copy_decays(decays_s, log_decay, token - 64, n * K, end, heads * K, K)
        copy_ends(ends_s, ends, place + c - 1, c > 0, K)
        copy_tokens(values_s, v, token - 64, 0, end, v_token)
        copy_state(before_s, states, (first_chunk + c - 1).to(gl.int64) * heads + n, c > 0, K)
        async_copy.commit_group()
        if log_decay_grad is not None:
            dg = warpgroup_mma_wait(3, deps=[dg])
            dg += gl.expand_dims(through_s.load(OF_CHANNELS), 0) - keys_s.load(KEYS).to(gl.float32)
            if NARROW:
                store_rows(log_decay_grad, token, n * K, stop, heads * K, dg, LAYOUT=STORE)
            else:
                at = at_tile(log_decay_grad, token, n * K, heads * K, KEYS, 64, K)
                valid = gl.expand_dims(gl.arange(0, 64, OF_TOKENS), 1) < stop - token
                gl.store(at, dg, mask=valid)
        dS = warpgroup_mma_wait(2, deps=[dS])
        barrier()
        copy_keys(queries_s, q, token - 64, 0, end, q_token, K)
        copy_keys(keys_s, k, token - 64, 0, end, k_token, K)
        async_copy.commit_group()
        dS *= gl.expand_dims(rest, 1)
        dV = warpgroup_mma_wait(0, deps=[dV])
        store_rows(v_grad, token, n * 128, stop, heads * 128, dV, LAYOUT=OCTETS)
    if first is not None:
        gl.store(first + offsets, dS)
