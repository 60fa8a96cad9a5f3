"""Decays per key channel in one pass over the chunks of a sequence, on Hopper: outputs, states, or all gradients.

With b the log decays of a chunk summed from its start, and per channel two reference points r and s:

    Q' = Q e^{b − r}     K' = K e^{s − b}     S' = e^r S     dS' = e^{b_C − s} dS

    forward    O = Q' S' + lower(Q' K'ᵀ) V          S ← e^{b_C − s} (e^{s − r} S' + K'ᵀ V)
    backward   D = lower(dO Vᵀ)                     dV = lower(Q' K'ᵀ)ᵀ dO + K' dS'
               dQ = e^{b − r} ⊙ (dO S'ᵀ + D K')     dK = e^{s − b} ⊙ (V dS'ᵀ + Dᵀ Q')
               dS ← e^r (e^{s − r} dS' + Q'ᵀ dO)

Both reference points are b in the middle of the chunk, so that Q' K'ᵀ has the decays between its tokens. Where a decay
from there to an end of the chunk is too strong for the exponent of a factor (a steep channel), r is 0 and s is b_C:
what passes through the state is right. The scores of such a chunk, and their gradients, come by halves
(`gpu/halves.py`): pairs in different halves of the chunk or of blocks of 32 tokens with the reference between the
halves, pairs in a block of 16 tokens with one in its middle, or by halves too where that does not suffice.

All references are whole numbers in log2. With b = n + x for the nearest whole number n, factors 2^x are rounded once,
in Q 2^x and K 2^−x, and a reference only changes exponents: 2^(n − r) and 2^(s − n). So no choice changes a bit of a
row, although it depends on later tokens. Exponents are numbers of 16 bits, two in a register.

A program has a whole state [K,128], K = 64 or 128, in the registers of eight warps. Sums of decays from the start of a
chunk are products with the lower triangle of ones: of decays in bf16 as they are, of those in fp32 in two parts of 8
bits. The states S' before all chunks, which the gradients need, are stored with the outputs or computed again. In the
gradient pass, the loads of a chunk are issued as soon as the chunk before has read a buffer for the last time. Loops
over chunks compute what all chunks share in each of them again (`disable_licm`), where it would not fit in registers.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ...gpu.gluon_halves import (
    allocate_middles,
    apart,
    exponent_after,
    exponent_before,
    power,
    reciprocal,
    times,
    whole_and_rest,
)
from ...gpu.gluon_tiles import (
    COPY,
    FLAT,
    NARROW_OCTETS,
    OCTETS,
    OF_COLUMNS,
    OF_ROWS,
    PAIRS,
    ROWS,
    SHARED,
    STATE,
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
from .hopper_vector_halves import gradients_by_halves, lower_triangle, scores_by_halves
from .hopper_vector_sums import (
    LEAST,
    LOG2E,
    allocate_points,
    at_end,
    at_start,
    bounded,
    copy_decays,
    copy_ends,
    copy_keys,
    from_start,
    of_state,
    split,
    steepness,
    store_points,
    sums_of_blocks,
    waited,
)

DECAYS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
LINES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit(do_not_specialize=["chunks", "groups"])
def outputs(
    q,
    k,
    v,
    log_decay,
    out,
    into,
    ends,
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
    n, start, stop, first_chunk, state = segment_of(segments, heads)
    place = n.to(gl.int64) * chunks + first_chunk
    value_head = n // SUBHEADS
    key_head = key_head_of(n, groups, SUBHEADS)
    q += key_head.to(gl.int64) * q_head
    k += key_head.to(gl.int64) * k_head
    v += value_head.to(gl.int64) * v_head
    count = gl.cdiv(stop - start, 64)

    queries_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, K], SHARED)
    keys_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, K], SHARED)
    decays_s = gl.allocate_shared_memory(gl.float32, [2, 64, K], DECAYS)
    values_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 128], SHARED)
    state_s = gl.allocate_shared_memory(gl.bfloat16, [K, 128], SHARED)
    lower_s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    scores_s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    ends_s = gl.allocate_shared_memory(gl.float32, [8, K], LINES)
    points, middles_s = allocate_points(K), allocate_middles(K)

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
    for i in tl.range(count, disable_licm=True):
        token = start + i * 64
        stage, following = i % 2, (i + 1) % 2
        queries, keys, values = queries_s.index(stage), keys_s.index(stage), values_s.index(stage)
        decays = decays_s.index(stage)
        async_copy.wait_group(0)
        barrier()
        if i + 1 < count:
            copy_decays(decays_s.index(following), log_decay, token + 64, n * K, stop, heads * K, K)
            copy_keys(queries_s.index(following), q, token + 64, 0, stop, q_token, K)
            copy_keys(keys_s.index(following), k, token + 64, 0, stop, k_token, K)
            copy_tokens(values_s.index(following), v, token + 64, 0, stop, v_token)
        async_copy.commit_group()
        sums_of_blocks(ends_s, decays, None if into is None else ends + (place + i) * (8 * K), NARROW, K)
        g = bounded(decays, NARROW, K)
        barrier()
        store_points(points, middles_s, ends_s)
        split(decays, g, NARROW, K)
        fence_async_shared()
        barrier()
        b = from_start(lower_s, decays, channels, NARROW, K)
        entering, within, leaving = of_state(points, OF_STATE)
        S *= gl.expand_dims(gl.exp2(entering), 1)
        state_s.store(S.to(gl.bfloat16))
        S *= gl.expand_dims(gl.exp2(within), 1)
        rest = gl.exp2(leaving)
        b = waited(b, NARROW)
        exponents, reach = whole_and_rest(b)
        read = (queries.load(KEYS).to(gl.float32) * (gl.exp2(reach) * scale)).to(gl.bfloat16)
        written = (keys.load(KEYS).to(gl.float32) * gl.exp2(-reach)).to(gl.bfloat16)
        steep = steepness(points)
        near, earlier, by_halves = queries, keys, pairs
        if steep != 0:
            here = opaque(stage)  # addresses are computed again, rather than kept for the products of all chunks
            tiles = reinterpret(decays_s.index(here), gl.bfloat16, [2, 64, K], SHARED)
            near, earlier = tiles.index(0), tiles.index(1)
            shared = near, earlier, queries_s.index(here), keys_s.index(here)
            by_halves = scores_by_halves(read, written, exponents, points, middles_s, steep, *shared, KEYS)
        else:
            queries.store(times(read, exponent_after(exponents, at_start(points, KEYS))))
            keys.store(times(written, exponent_before(exponents, at_end(points, KEYS))))
        fence_async_shared()
        barrier()
        A = warpgroup_mma(near, earlier.permute((1, 0)), pairs, use_acc=False, is_async=True)
        O = warpgroup_mma(queries, state_s, rows, use_acc=False, is_async=True)
        S = warpgroup_mma(keys.permute((1, 0)), values, S, is_async=True)
        A = warpgroup_mma_wait(2, deps=[A])
        A = gl.where(apart() < gl.where(steep == 0, 64, gl.where(steep == 1, 16, 1)), A, by_halves)
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
    ends_s = gl.allocate_shared_memory(gl.float32, [8, K], LINES)
    points = allocate_points(K)

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
    for i in tl.range(count, disable_licm=True):
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
        sums_of_blocks(ends_s, decays, None if into is None else ends + (place + c) * (8 * K), NARROW, K)
        g = bounded(decays, NARROW, K)
        barrier()
        store_points(points, None, ends_s)
        split(decays, g, NARROW, K)
        fence_async_shared()
        barrier()
        b = from_start(lower_s, decays, channels, NARROW, K)
        entering, within, leaving = of_state(points, OF_STATE)
        survives += entering + within + leaving
        S *= gl.expand_dims(gl.exp2(leaving if REVERSE else entering), 1)
        if into is not None:
            state_s.store(S.to(gl.bfloat16))
        S *= gl.expand_dims(gl.exp2(within), 1)
        rest = gl.exp2(entering if REVERSE else leaving)
        b = waited(b, NARROW)
        exponents, reach = whole_and_rest(b)
        factor = gl.exp2(reach) * scale if REVERSE else gl.exp2(-reach)
        x_ = (xs.load(KEYS).to(gl.float32) * factor).to(gl.bfloat16)
        if REVERSE:
            xs.store(times(x_, exponent_after(exponents, at_start(points, KEYS))))
        else:
            xs.store(times(x_, exponent_before(exponents, at_end(points, KEYS))))
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


@gluon.jit
def of_tiles(a, b, c, d, i):
    """Return the i-th tile of each of four allocations."""
    return a.index(i), b.index(i), c.index(i), d.index(i)


@gluon.jit
def erase_at_resets(
    log_decay, log_decay_grad, token, column, stop, stride: gl.constexpr, LAYOUT: gl.constexpr, K: gl.constexpr
):
    """Store zeros as gradients of decays of −inf, or so strong that they count as such."""
    valid = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)), 1) < stop - token
    g = gl.load(at_tile(log_decay, token, column, stride, LAYOUT, 64, K), mask=valid, other=0.0).to(gl.float32)
    zeros = gl.zeros([64, K], log_decay_grad.dtype.element_ty, LAYOUT)
    at = at_tile(log_decay_grad, token, column, stride, LAYOUT, 64, K)
    gl.store(at, zeros, mask=valid & (g * LOG2E <= LEAST))


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

    queries_m = gl.allocate_shared_memory(gl.bfloat16, [1, 64, K], SHARED)  # then what goes into the gradient of b
    keys_m = gl.allocate_shared_memory(gl.bfloat16, [1, 64, K], SHARED)  # likewise
    values_m = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 128], SHARED)
    grad_m = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 128], SHARED)
    decays_m = gl.allocate_shared_memory(gl.float32, [1, 64, K], DECAYS)
    before_m = gl.allocate_shared_memory(gl.bfloat16, [1, K, 128], SHARED)
    after_s = gl.allocate_shared_memory(gl.bfloat16, [K, 128], SHARED)
    enter_m = gl.allocate_shared_memory(gl.bfloat16, [1, 64, K], SHARED)
    leave_m = gl.allocate_shared_memory(gl.bfloat16, [1, 64, K], SHARED)
    pairs_m = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], SHARED)
    scores_m = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], SHARED)
    lower_m = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], SHARED)
    queries_s, keys_s, values_s, grad_s = of_tiles(queries_m, keys_m, values_m, grad_m, 0)
    enter_s, leave_s, pairs_s, scores_s = of_tiles(enter_m, leave_m, pairs_m, scores_m, 0)
    decays_s, before_s, lower_s = decays_m.index(0), before_m.index(0), lower_m.index(0)
    ends_s = reinterpret(pairs_s, gl.float32, [8, K], LINES)  # until there are pairs
    points, middles_s = allocate_points(K), allocate_middles(K)
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
        copy_state(before_s, states, (first_chunk + c).to(gl.int64) * heads + n, True, K)
        async_copy.commit_group()
        copy_keys(queries_s, q, token, 0, stop, q_token, K)
        copy_keys(keys_s, k, token, 0, stop, k_token, K)
        copy_tokens(values_s, v, token, 0, stop, v_token)
        async_copy.commit_group()
    for i in tl.range(count, disable_licm=True):
        c = count - 1 - i
        zero = opaque(c * 0)  # addresses are computed again, rather than kept in registers for all chunks
        queries_s, keys_s, values_s, grad_s = of_tiles(queries_m, keys_m, values_m, grad_m, zero)
        enter_s, leave_s, pairs_s, scores_s = of_tiles(enter_m, leave_m, pairs_m, scores_m, zero)
        token = start + c * 64
        async_copy.wait_group(1)
        barrier()
        copy_tokens(grad_s, grad, token, 0, stop, grad_token)
        async_copy.commit_group()
        g = bounded(decays_s, NARROW, K)
        store_points(points, middles_s, ends_s)
        barrier()
        entering, within, leaving = of_state(points, OF_STATE)
        dS *= gl.expand_dims(gl.exp2(leaving), 1)
        after_s.store(dS.to(gl.bfloat16))
        split(decays_s, g, NARROW, K)
        fence_async_shared()
        barrier()
        b = from_start(lower_s, decays_s, channels, NARROW, K)
        if log_decay_grad is not None:
            through_s.store(gl.sum(before_s.load(STATES).to(gl.float32) * dS, 1) * gl.exp2(within))
        dS *= gl.expand_dims(gl.exp2(within), 1)
        rest = gl.exp2(entering)
        async_copy.wait_group(1)
        b = waited(b, NARROW)
        barrier()
        steep = steepness(points)
        exponents, reach = whole_and_rest(b)
        exponents_s = reinterpret(decays_s, gl.int16, [2, 64, K], SHARED).index(0)
        factors_s = reinterpret(decays_s, gl.float16, [2, 64, K], SHARED).index(1)
        exponents_s.store(exponents)
        factors_s.store(gl.exp2(reach).to(gl.float16))
        read = (queries_s.load(KEYS).to(gl.float32) * (gl.exp2(reach) * scale)).to(gl.bfloat16)
        written = (keys_s.load(KEYS).to(gl.float32) * gl.exp2(-reach)).to(gl.bfloat16)
        queries_s.store(read)
        keys_s.store(written)
        if steep == 0:
            enter_s.store(times(read, exponent_after(exponents, at_start(points, KEYS))))
            leave_s.store(times(written, exponent_before(exponents, at_end(points, KEYS))))
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        D = warpgroup_mma(grad_s, values_s.permute((1, 0)), pairs, use_acc=False, is_async=True)
        # a token paired with itself does not decay: these pairs stay out of the terms that have to cancel
        itself_s.store(gl.sum(grad_s.load(COPY).to(gl.float32) * values_s.load(COPY).to(gl.float32), 1))
        D = warpgroup_mma_wait(0, deps=[D])
        if steep == 0:
            A = warpgroup_mma(enter_s, leave_s.permute((1, 0)), pairs, use_acc=False, is_async=True)
            dQ = warpgroup_mma(grad_s, before_s.permute((1, 0)), channels, use_acc=False, is_async=True)
            pairs_s.store(gl.where(distance() > 0, D, 0.0).to(gl.bfloat16))
            A = warpgroup_mma_wait(1, deps=[A])
            scores_s.store(gl.where(distance() >= 0, A, 0.0).to(gl.bfloat16))
            fence_async_shared()
            barrier()
            dQ = warpgroup_mma(pairs_s, leave_s, dQ, is_async=True)
            dK = warpgroup_mma(pairs_s.permute((1, 0)), enter_s, channels, use_acc=False, is_async=True)
            dQ, dK = warpgroup_mma_wait(0, deps=[dQ, dK])
            dQ *= power(exponent_after(exponents_s.load(KEYS), at_start(points, KEYS)))
            dK *= power(exponent_before(exponents_s.load(KEYS), at_end(points, KEYS)))
        else:
            zero = opaque(c * 0)
            inputs = of_tiles(queries_m, keys_m, values_m, grad_m, zero)
            room = of_tiles(enter_m, leave_m, pairs_m, scores_m, zero)
            exponents_s = reinterpret(decays_m.index(zero), gl.int16, [2, 64, K], SHARED).index(0)
            others = before_m.index(zero), exponents_s, points, middles_s, steep
            dQ, dK = gradients_by_halves(*inputs, *others, *room, lower_m.index(zero), D, KEYS)
        itself = gl.expand_dims(itself_s.load(OF_TOKENS), 1)
        # Tiles are loaded for each use, and the gradient of q stored before the rest of that of k: registers are short.
        # Later tokens reach back past this one, earlier ones forward. Pairs of two later tokens cancel in the sum of
        # both, so both take the factors as the products took them, rounded to bf16.
        past = queries_s.load(KEYS).to(gl.float32) * dQ - keys_s.load(KEYS).to(gl.float32) * dK
        dQ = (dQ + itself * keys_s.load(KEYS).to(gl.float32)) * (factors_s.load(KEYS).to(gl.float32) * scale)
        store_rows(q_grad, token, n * K, stop, heads * K, dQ, LAYOUT=STORE)
        dK += itself * queries_s.load(KEYS).to(gl.float32)
        T = warpgroup_mma(values_s, after_s.permute((1, 0)), channels, use_acc=False, is_async=True)
        rounded = past.to(gl.bfloat16)
        remainder = (past - rounded.to(gl.float32)).to(gl.bfloat16)
        if log_decay_grad is not None:
            queries_s.store(rounded)
        T = warpgroup_mma_wait(0, deps=[T])
        T *= power(exponent_before(exponents_s.load(KEYS), at_end(points, KEYS)))
        dK += T
        # `past` is summed over later tokens, so it takes two numbers in bf16: rounded to one, it has most of the error.
        remainder_s = reinterpret(values_s, gl.bfloat16, [128 // K, 64, K], SHARED).index(0)
        if log_decay_grad is not None:
            barrier()
            remainder_s.store(remainder)
            keys_s.store((keys_s.load(KEYS).to(gl.float32) * T).to(gl.bfloat16))
        store_rows(
            k_grad, token, n * K, stop, heads * K, dK * reciprocal(factors_s.load(KEYS).to(gl.float32)), LAYOUT=STORE
        )
        fence_async_shared()
        barrier()
        if log_decay_grad is not None:
            dg = warpgroup_mma(lower_s, keys_s, channels, use_acc=False, is_async=True)
            dg = warpgroup_mma(lower_s.permute((1, 0)), queries_s, dg, is_async=True)
            dg = warpgroup_mma(lower_s.permute((1, 0)), remainder_s, dg, is_async=True)
        dS = warpgroup_mma(enter_s.permute((1, 0)), grad_s, dS, is_async=True)
        dV = warpgroup_mma(leave_s, after_s, rows, use_acc=False, is_async=True)
        dV = warpgroup_mma(scores_s.permute((1, 0)), grad_s, dV, is_async=True)
        # The chunk before; masked rather than skipped, since a branch among products that run would make them wait.
        end = gl.where(c > 0, stop, token - 64)
        copy_decays(decays_s, log_decay, token - 64, n * K, end, heads * K, K)
        copy_ends(ends_s, ends, place + c - 1, c > 0, K)
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
        copy_tokens(values_s, v, token - 64, 0, end, v_token)
        async_copy.commit_group()
        dS *= gl.expand_dims(rest, 1)
        dV = warpgroup_mma_wait(0, deps=[dV])
        store_rows(v_grad, token, n * 128, stop, heads * 128, dV, LAYOUT=OCTETS)
        if log_decay_grad is not None and steep == 2:
            barrier()
            erase_at_resets(log_decay, log_decay_grad, token, n * K, stop, heads * K, KEYS, K)
    if first is not None:
        gl.store(first + offsets, dS)
