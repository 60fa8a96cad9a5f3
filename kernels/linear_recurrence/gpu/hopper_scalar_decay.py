"""Decays per head, constant ones or none: all gradients in one pass over the chunks of a sequence, on Hopper.

With b the log decays of a chunk summed from its start, S the state before it, dS the gradient of the state after it,
and D_ij = e^{b_i − b_j} for j ≤ i:

    P = scale · Q Kᵀ ⊙ D                dV = Pᵀ dO + e^{b_C − b} ⊙ K dS
    G = scale · dO Vᵀ ⊙ D               dQ = G K + scale · e^b ⊙ dO Sᵀ
    dS ← e^{b_C} dS + (scale · e^b ⊙ Q)ᵀ dO         dK = Gᵀ Q + e^{b_C − b} ⊙ V dSᵀ

With input gates, V is β ⊙ V in all but the gradient of itself: dV is that of β ⊙ V, and dβ the sums of V ⊙ dV over
channels.

A program has a whole state [128,V], V = 64 or 128, in the registers of eight warps. `states` computes S before all
chunks again, `gradients` runs from the end. The gradient of the log decay of token i sums what later tokens of the
chunk read from before it and what earlier ones wrote to after it, so terms of one sign, and e^{b_C} ⟨S, dS⟩ for what
passes through the chunk. A token paired with itself does not decay and is left out. The loads of a chunk are issued a
chunk ahead.
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
    NARROW_STATE,
    OCTETS,
    OF_COLUMNS,
    OF_ROWS,
    OF_TOKENS,
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
    segment_of,
    store_rows,
)

# of the gates of a chunk, [5,64]; the first four parts are copied (`sequential_pass.py`)
PARTS = gl.constexpr(5)
SUMS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))  # tokens × tokens, a row within a warp
DOWN, ACROSS = gl.constexpr(gl.SliceLayout(1, SUMS)), gl.constexpr(gl.SliceLayout(0, SUMS))


@gluon.jit
def copy_gates(shared, gates, place, wanted, BETA: gl.constexpr = False):
    """Start to copy ENTER, LEAVE, TOTAL and SUMS of a chunk, and with `BETA` also β; each thread one number or two."""
    NUMBERS: gl.constexpr = 512 if BETA else 256
    at = gl.arange(0, NUMBERS, gl.BlockedLayout([1], [32], [8], [0]))
    async_load(shared, gates + (place * (PARTS * 64) + at), mask=(at < PARTS * 64) & wanted)


@gluon.jit
def in_halves(x):
    """Sums [2,64] of both halves of the rows of x; neither needs anything from another warp."""
    R: gl.constexpr = x.shape[0]
    C: gl.constexpr = x.shape[1]
    return gl.permute(gl.sum(gl.reshape(x, [R, 2, C // 2]), 2), (1, 0))


@gluon.jit
def store_halves(shared, x):
    shared.store(gl.reshape(in_halves(x), [128]))


@gluon.jit
def whole_sums(halves, LAYOUT: gl.constexpr):
    """The sums of whole rows."""
    return halves.slice(0, 64).load(LAYOUT) + halves.slice(64, 64).load(LAYOUT)


@gluon.jit(do_not_specialize=["chunks", "groups"])
def states(
    k,
    v,
    gates,
    into,
    first,
    segments,
    scale,
    k_head,
    v_head,
    chunks,
    groups,
    k_token: gl.constexpr,
    v_token: gl.constexpr,
    heads: gl.constexpr,
    SUBHEADS: gl.constexpr,
    V: gl.constexpr,
):
    STATES: gl.constexpr = STATE if V == 128 else NARROW_STATE
    VALUES: gl.constexpr = COPY if V == 128 else NARROW_COPY
    OF_STATE: gl.constexpr = gl.SliceLayout(1, STATES)
    n, start, stop, first_chunk, state = segment_of(segments, heads)
    place = n.to(gl.int64) * chunks + first_chunk
    value_head = n // SUBHEADS
    k += key_head_of(n, groups, SUBHEADS).to(gl.int64) * k_head
    v += value_head.to(gl.int64) * v_head
    count = gl.cdiv(stop - start, 64)

    keys_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 128], SHARED)
    values_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, V], SHARED)
    gates_s = gl.allocate_shared_memory(gl.float32, [2, 256], FLAT)
    state_s = gl.allocate_shared_memory(gl.bfloat16, [128, V], SHARED)

    S = gl.zeros([128, V], gl.float32, STATES)
    if first is not None:
        S = gl.load(first + in_states(state, n, heads, STATES, 128, V))
    if count > 0:
        copy_tokens(keys_s.index(0), k, start, 0, stop, k_token)
        copy_tokens(values_s.index(0), v, start, 0, stop, v_token, VALUES, 1, V)
        copy_gates(gates_s.index(0), gates, place, True)
    async_copy.commit_group()
    for c in range(count):
        token = start + (c + 1) * 64  # of the next chunk
        keys, values, gates_here = keys_s.index(c % 2), values_s.index(c % 2), gates_s.index(c % 2)
        async_copy.wait_group(0)
        barrier()
        copy_tokens(keys_s.index((c + 1) % 2), k, token, 0, stop, k_token)
        copy_tokens(values_s.index((c + 1) % 2), v, token, 0, stop, v_token, VALUES, 1, V)
        copy_gates(gates_s.index((c + 1) % 2), gates, place + c + 1, c + 1 < count)
        async_copy.commit_group()
        state_s.store(S.to(gl.bfloat16))
        leave = gl.expand_dims(gates_here.slice(64, 64).load(OF_TOKENS), 1)
        keys.store((keys.load(ROWS).to(gl.float32) * leave).to(gl.bfloat16))
        fence_async_shared()
        barrier()
        S *= gl.expand_dims(gates_here.slice(128, 1).load(OF_STATE), 1)
        S = warpgroup_mma(keys.permute((1, 0)), values, S, is_async=True)
        at = at_tile(into, ((first_chunk + c).to(gl.int64) * heads + n) * 128, 0, V, VALUES, 128, V)
        gl.store(at, state_s.load(VALUES))
        S = warpgroup_mma_wait(0, deps=[S])


@gluon.jit(do_not_specialize=["chunks", "groups"])
def gradients(
    q,
    k,
    v,
    grad,
    gates,
    states,
    q_grad,
    k_grad,
    v_grad,
    log_decay_grad,
    beta_grad,
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
    V: gl.constexpr,
    BETA: gl.constexpr,
):
    STATES: gl.constexpr = STATE if V == 128 else NARROW_STATE
    VALUES: gl.constexpr = ROWS if V == 128 else PAIRS  # layout of a tile [64, V]
    COPIES: gl.constexpr = COPY if V == 128 else NARROW_COPY
    STORED: gl.constexpr = OCTETS if V == 128 else NARROW_OCTETS
    OF_VALUES: gl.constexpr = gl.SliceLayout(1, VALUES)
    OF_STATE: gl.constexpr = gl.SliceLayout(1, STATES)
    n, start, stop, first_chunk, state = segment_of(segments, heads)
    place = n.to(gl.int64) * chunks + first_chunk
    value_head = n // SUBHEADS
    key_head = key_head_of(n, groups, SUBHEADS)
    q += key_head.to(gl.int64) * q_head
    k += key_head.to(gl.int64) * k_head
    v += value_head.to(gl.int64) * v_head
    grad += value_head.to(gl.int64) * grad_head
    count = gl.cdiv(stop - start, 64)

    Q_s = gl.allocate_shared_memory(gl.bfloat16, [64, 128], SHARED)
    keys_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 128], SHARED)
    values_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, V], SHARED)
    grad_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, V], SHARED)
    before_s = gl.allocate_shared_memory(gl.bfloat16, [128, V], SHARED)
    after_s = gl.allocate_shared_memory(gl.bfloat16, [128, V], SHARED)
    enter_s = gl.allocate_shared_memory(gl.bfloat16, [64, 128], SHARED)
    pairs_s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    scores_s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    gates_s = gl.allocate_shared_memory(gl.float32, [2, 512 if BETA else 256], FLAT)
    # Sums over channels, a half from each of two warps, so that none waits for the other.
    itself_s = gl.allocate_shared_memory(gl.float32, [128], FLAT)
    later_s = gl.allocate_shared_memory(gl.float32, [128], FLAT)
    earlier_s = gl.allocate_shared_memory(gl.float32, [128], FLAT)
    through_s = gl.allocate_shared_memory(gl.float32, [128], FLAT)
    written_s = gl.allocate_shared_memory(gl.float32, [128], FLAT)

    offsets = in_states(state, n, heads, STATES, 128, V)
    dS = gl.zeros([128, V], gl.float32, STATES)
    if last is not None:
        dS = gl.load(last + offsets)
    rows, pairs = gl.zeros([64, 128], gl.float32, ROWS), gl.zeros([64, 64], gl.float32, PAIRS)
    values = gl.zeros([64, V], gl.float32, VALUES)
    if count > 0:
        token, c = start + (count - 1) * 64, count - 1
        copy_tokens(grad_s.index(0), grad, token, 0, stop, grad_token, COPIES, 1, V)
        copy_tokens(values_s.index(0), v, token, 0, stop, v_token, COPIES, 1, V)
        copy_tokens(Q_s, q, token, 0, stop, q_token)
        copy_tokens(keys_s.index(0), k, token, 0, stop, k_token)
        copy_gates(gates_s.index(0), gates, place + c, True, BETA)
        copy_state(before_s, states, (first_chunk + c).to(gl.int64) * heads + n, True, 128, V, COPIES)
    async_copy.commit_group()
    for i in range(count):
        c = count - 1 - i
        token = start + c * 64
        K_s, V_s, dO_s, gates_here = (
            keys_s.index(i % 2),
            values_s.index(i % 2),
            grad_s.index(i % 2),
            gates_s.index(i % 2),
        )
        after_s.store(dS.to(gl.bfloat16))
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        if log_decay_grad is not None:
            through_s.store(gl.sum(before_s.load(STATES).to(gl.float32) * dS, 1))
        D = warpgroup_mma(dO_s, V_s.permute((1, 0)), pairs, use_acc=False, is_async=True)
        A = warpgroup_mma(Q_s, K_s.permute((1, 0)), pairs, use_acc=False, is_async=True)
        dQ = warpgroup_mma(dO_s, before_s.permute((1, 0)), rows, use_acc=False, is_async=True)
        # The chunk before; masked rather than skipped, since a branch among products that run would make them wait.
        end = gl.where(c > 0, stop, token - 64)
        copy_tokens(grad_s.index((i + 1) % 2), grad, token - 64, 0, end, grad_token, COPIES, 1, V)
        copy_tokens(values_s.index((i + 1) % 2), v, token - 64, 0, end, v_token, COPIES, 1, V)
        copy_tokens(keys_s.index((i + 1) % 2), k, token - 64, 0, end, k_token)
        copy_gates(gates_s.index((i + 1) % 2), gates, place + c - 1, c > 0, BETA)
        async_copy.commit_group()
        enter = gl.expand_dims(gates_here.slice(0, 64).load(OF_TOKENS), 1)
        enter_s.store((Q_s.load(ROWS).to(gl.float32) * enter).to(gl.bfloat16))
        b = gates_here.slice(192, 64)
        between = gl.expand_dims(b.load(OF_ROWS), 1) - gl.expand_dims(b.load(OF_COLUMNS), 0)
        decay = gl.exp2(gl.minimum(between, 0.0)) * scale
        D, A = warpgroup_mma_wait(1, deps=[D, A])
        if BETA:
            D *= gl.expand_dims(gates_here.slice(256, 64).load(OF_COLUMNS), 0)
        store_halves(itself_s, gl.where(distance() == 0, D * scale, 0.0))
        pairs_s.store(gl.where(distance() > 0, D * decay, 0.0).to(gl.bfloat16))
        scores_s.store(gl.where(distance() >= 0, A * decay, 0.0).to(gl.bfloat16))
        dQ = warpgroup_mma_wait(0, deps=[dQ])
        dQ *= enter
        fence_async_shared()
        barrier()
        dQ = warpgroup_mma(pairs_s, K_s, dQ, is_async=True)
        dK = warpgroup_mma(pairs_s.permute((1, 0)), Q_s, rows, use_acc=False, is_async=True)
        dS *= gl.expand_dims(gates_here.slice(128, 1).load(OF_STATE), 1)
        dS = warpgroup_mma(enter_s.permute((1, 0)), dO_s, dS, is_async=True)
        copy_state(before_s, states, (first_chunk + c - 1).to(gl.int64) * heads + n, c > 0, 128, V, COPIES)
        async_copy.commit_group()
        itself = gl.expand_dims(whole_sums(itself_s, OF_TOKENS), 1)
        dQ = warpgroup_mma_wait(2, deps=[dQ])
        if log_decay_grad is not None:
            # later tokens reach back past this one, earlier ones forward: sums of one sign, not differences
            later = in_halves(Q_s.load(ROWS).to(gl.float32) * dQ)
        dQ += itself * K_s.load(ROWS).to(gl.float32)
        store_rows(q_grad, token, n * 128, stop, heads * 128, dQ, LAYOUT=OCTETS)
        T = warpgroup_mma(V_s, after_s.permute((1, 0)), rows, use_acc=False, is_async=True)
        dK = warpgroup_mma_wait(2, deps=[dK])
        if log_decay_grad is not None:
            later -= in_halves(K_s.load(ROWS).to(gl.float32) * dK)
        dK += itself * Q_s.load(ROWS).to(gl.float32)
        leave = gl.expand_dims(gates_here.slice(64, 64).load(OF_TOKENS), 1)
        dS, T = warpgroup_mma_wait(0, deps=[dS, T])
        dV = warpgroup_mma(K_s, after_s, values, use_acc=False, is_async=True)
        T *= leave
        barrier()  # all have read the queries
        copy_tokens(Q_s, q, token - 64, 0, end, q_token)
        async_copy.commit_group()
        if log_decay_grad is not None:
            later_s.store(gl.reshape(later, [128]))
            store_halves(earlier_s, K_s.load(ROWS).to(gl.float32) * T)
        store_rows(k_grad, token, n * 128, stop, heads * 128, dK + T, LAYOUT=OCTETS)
        dV = warpgroup_mma_wait(0, deps=[dV])
        if BETA:
            dV *= gl.expand_dims(gl.exp2(b.slice(63, 1).load(OF_VALUES) - b.load(OF_VALUES)), 1)
        elif V == 128:
            dV *= leave
        else:
            dV *= gl.expand_dims(gates_here.slice(64, 64).load(OF_VALUES), 1)
        dV = warpgroup_mma(scores_s.permute((1, 0)), dO_s, dV, is_async=True)
        barrier()  # all have read the state after
        if log_decay_grad is not None:
            through = whole_sums(through_s, ACROSS) * gates_here.slice(128, 1).load(ACROSS)
            later, earlier = whole_sums(later_s, ACROSS) + through, whole_sums(earlier_s, ACROSS) + through
            r = gl.arange(0, 64, DOWN)
            before = gl.expand_dims(r, 1) > gl.expand_dims(gl.arange(0, 64, ACROSS), 0)
            around = gl.sum(gl.where(before, gl.expand_dims(earlier, 0), gl.expand_dims(later, 0)), 1)
            at = log_decay_grad + ((token + r).to(gl.int64) * heads + n)
            gl.store(at, around, mask=r < stop - token)
        dV = warpgroup_mma_wait(0, deps=[dV])
        if BETA:
            if beta_grad is not None:
                store_halves(written_s, V_s.load(VALUES).to(gl.float32) * dV)
                barrier()
                r = gl.arange(0, 64, DOWN)
                at = beta_grad + ((token + r).to(gl.int64) * heads + n)
                gl.store(at, whole_sums(written_s, DOWN), mask=r < stop - token)
            dV *= gl.expand_dims(gates_here.slice(256, 64).load(OF_VALUES), 1)
        store_rows(v_grad, token, n * V, stop, heads * V, dV, LAYOUT=STORED)
    if first is not None:
        gl.store(first + offsets, dS)
