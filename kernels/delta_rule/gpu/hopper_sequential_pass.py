"""The forward pass along time of `sequential_pass.py` in Gluon: Hopper, bf16, keys of 128 channels.

Groups of warps share the work, so that the next chunk waits for nothing but the state:

    copies     bring the tiles of the chunks ahead into rings of buffers
    chain      W = V − e^b ⊙ K S, U = inverse W, S ← e^{b_C} S + (e^{b_C − b} K)ᵀ U: all that the next chunk needs
    results    O = scale · e^b ⊙ Q S + scores W; store O, the state and U

Everything is transposed: 64 values are the rows of all products that they are part of. A chain carries the state of 64
values. It keeps its left operands in registers, and hands S, W and U over in shared memory. A program has one chain, or
two, for which the same tiles are read and the same scores computed. Either way, the bits are equal.

Without scores in memory, `inverse` holds β H of `hopper_prepare.py` in fp16, and the results compute the scores, while
the chains are at work on the chunk before:

    scores = scale · (D ⊙ Q Kᵀ) β H      W = β ⊙ (V − e^b ⊙ K S)      U = β H W
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...gpu.gluon_tiles import FLAT, SHARED, async_load, at_tile, barrier, copy_pairs, copy_tokens, done, reinterpret
from .hopper_groups import (
    COPIERS,
    COPY,
    COPY_PAIRS,
    OF_COLUMNS,
    OF_PAIRS,
    OF_ROWS,
    OF_STATE,
    PAIRS,
    STATE,
    copy_block,
    in_state,
    write_block,
)

LATE = gl.constexpr(2)  # buffers of what the results alone read
COPY_GATES = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))


@gluon.jit
def of_columns(gates, first: gl.constexpr):
    """64 numbers of the gates, one for each column of a tile of pairs."""
    return gl.expand_dims(gates.slice(first, 64).load(OF_COLUMNS), 0)


@gluon.jit
def of_rows(gates, first: gl.constexpr):
    """64 numbers of the gates, one for each row of a tile of pairs."""
    return gl.expand_dims(gates.slice(first, 64).load(OF_ROWS), 1)


@gluon.jit
def copies(
    q, k, v, inverse, scores, gates,
    q_s, k_s, v_s, inverse_s, scores_s, gates_s, full, empty, full_late, empty_late,
    first, start, stop, m, column,
    M: gl.constexpr, E: gl.constexpr, R: gl.constexpr, STEPS: gl.constexpr, V: gl.constexpr,
    CHAINS: gl.constexpr, AHEAD: gl.constexpr, O: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """Bring all tiles."""
    keys: gl.constexpr = M // R  # heads of q and k
    head = ((m // (E * R)) * E + m % E) * 128
    for c in range(gl.cdiv(stop - start, 64)):
        token = start + c * 64
        tile = (first + c).to(gl.int64) * M + m
        i = c % AHEAD
        mbarrier.wait(empty.index(i), ((c // AHEAD) & 1) ^ 1)
        copy_tokens(k_s.index(i), k, token, head, stop, keys * 128, COPY)
        for h in gl.static_range(CHAINS):
            at = (m // E) * V + column + h * 64
            copy_block(v_s.index(i * CHAINS + h), v, token, at, stop, M // E * V)
        copy_pairs(inverse_s.index(i), inverse, tile, COPY_PAIRS)
        async_load(gates_s.index(i), gates + (tile * 256 + gl.arange(0, 256, COPY_GATES)))
        async_copy.mbarrier_arrive(full.index(i), increment_count=False)
        if O:
            i = c % LATE
            mbarrier.wait(empty_late.index(i), ((c // LATE) & 1) ^ 1)
            copy_tokens(q_s.index(i), q, token, head, stop, keys * 128, COPY, STEPS)
            if SCORES:
                copy_pairs(scores_s.index(i), scores, tile, COPY_PAIRS)
            async_copy.mbarrier_arrive(full_late.index(i), increment_count=False)


@gluon.jit
def chain(
    initial, final, k_s, v_s, inverse_s, gates_s, solve_s, before_s, w_s, u_s,
    full, empty, ready, free, ready_u, free_u, start, stop, column, state,
    V: gl.constexpr, H: gl.constexpr, CHAINS: gl.constexpr, AHEAD: gl.constexpr,
    INITIAL: gl.constexpr, FINAL: gl.constexpr, U: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """Carry the state of the values of chain H."""
    offsets = in_state(column + H * 64, V)
    S = gl.zeros([64, 128], gl.float32, STATE)
    if INITIAL:
        S = gl.load(initial + state + offsets).to(gl.float32)
    none = gl.zeros([64, 64], gl.float32, PAIRS)
    for c in range(gl.cdiv(stop - start, 64)):
        i = c % AHEAD
        before = S.to(gl.bfloat16)
        mbarrier.wait(full.index(i), (c // AHEAD) & 1)
        fence_async_shared()
        gates = gates_s.index(i)
        read = warpgroup_mma(
            gl.convert_layout(before, OF_PAIRS), k_s.index(i).permute((1, 0)), none, use_acc=False, is_async=True
        )
        solve = inverse_s.index(i)
        if not SCORES:
            solve_s.index(H).store(solve.load(PAIRS).to(gl.bfloat16))
            solve = solve_s.index(H)
            fence_async_shared()
            barrier()
        mbarrier.wait(free, (c & 1) ^ 1)
        before_s.index(H).store(before)
        read = warpgroup_mma_wait(0, deps=[read])
        # The values are loaded only here, because registers are short.
        W = v_s.index(i * CHAINS + H).permute((1, 0)).load(PAIRS).to(gl.float32)
        W -= read * of_columns(gates, 0)
        if not SCORES:
            W *= of_columns(gates, 64)
        W = W.to(gl.bfloat16)
        new = warpgroup_mma(gl.convert_layout(W, OF_PAIRS), solve.permute((1, 0)), none, use_acc=False, is_async=True)
        w_s.index(H).store(W)
        fence_async_shared()
        done(ready)
        S *= gl.expand_dims(gates.slice(63, 1).load(gl.SliceLayout(1, STATE)), 1)
        keep = of_columns(gates, 64)
        if not SCORES:
            high, low = gates.slice(191, 1).load(OF_COLUMNS), gates.slice(255, 1).load(OF_COLUMNS)
            keep = gl.expand_dims(high, 0) - of_columns(gates, 128) + (gl.expand_dims(low, 0) - of_columns(gates, 192))
            keep = gl.exp2(keep)
        new = warpgroup_mma_wait(0, deps=[new])
        decayed = gl.convert_layout((new * keep).to(gl.bfloat16), OF_STATE)
        S = warpgroup_mma(decayed, k_s.index(i), S, is_async=True)
        if U:
            mbarrier.wait(free_u, (c & 1) ^ 1)
            u_s.index(H).permute((1, 0)).store(new.to(gl.bfloat16))
            done(ready_u)
        S = warpgroup_mma_wait(0, deps=[S])
        done(empty.index(i))
    if FINAL:
        gl.store(final + state + offsets, S)


@gluon.jit
def results(
    o, u, states, q_s, k_s, inverse_s, gates_s, scores_s, before_s, w_s, u_s, state_s,
    full, empty, full_late, empty_late, ready, free, ready_u, free_u,
    first, start, stop, m, column, scale,
    M: gl.constexpr, STEPS: gl.constexpr, V: gl.constexpr, CHAINS: gl.constexpr, AHEAD: gl.constexpr,
    O: gl.constexpr, U: gl.constexpr, STATES: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """Store what the pass leaves of each chunk."""
    none = gl.zeros([64, 64], gl.float32, PAIRS)
    below = gl.expand_dims(gl.arange(0, 64, OF_ROWS), 1) >= gl.expand_dims(gl.arange(0, 64, OF_COLUMNS), 0)
    for c in range(gl.cdiv(stop - start, 64)):
        token = start + c * 64
        tile = (first + c).to(gl.int64) * M + m
        i, j = c % LATE, c % AHEAD
        if O:
            gates = gates_s.index(j)
            mbarrier.wait(full.index(j), (c // AHEAD) & 1)
            mbarrier.wait(full_late.index(i), (c // LATE) & 1)
            shrink = of_columns(gates, 0) * scale
            if not SCORES:
                fence_async_shared()
                pairs = warpgroup_mma(q_s.index(i), k_s.index(j).permute((1, 0)), none, use_acc=False, is_async=True)
                difference = of_rows(gates, 128) - of_columns(gates, 128)
                difference += of_rows(gates, 192) - of_columns(gates, 192)
                D = gl.where(below, gl.exp2(-gl.abs(difference)), 0.0)
                pairs = warpgroup_mma_wait(0, deps=[pairs])
                pairs = gl.convert_layout((pairs * D).to(gl.float16), OF_PAIRS)
                weights = warpgroup_mma(pairs, inverse_s.index(j), none, use_acc=False, is_async=True)
                weights = warpgroup_mma_wait(0, deps=[weights])
                scores_s.index(i).store((weights * scale).to(gl.bfloat16))
                fence_async_shared()
            done(empty.index(j))
        mbarrier.wait(ready, c & 1)
        if STATES:
            for h in gl.static_range(CHAINS):
                state_s.index(h).permute((1, 0)).store(before_s.index(h).load(STATE))
        if O:
            queries, weights_t = q_s.index(i).permute((1, 0)), scores_s.index(i).permute((1, 0))
            fence_async_shared()
            out = warpgroup_mma(before_s.index(0), queries, none, use_acc=False, is_async=True)
            if CHAINS == 2:
                other = warpgroup_mma(before_s.index(1), queries, none, use_acc=False, is_async=True)
                out = warpgroup_mma_wait(1, deps=[out])
            else:
                out = warpgroup_mma_wait(0, deps=[out])
            out = warpgroup_mma(w_s.index(0), weights_t, out * shrink, is_async=True)
            if CHAINS == 2:
                other = warpgroup_mma_wait(1, deps=[other])
                other = warpgroup_mma(w_s.index(1), weights_t, other * shrink, is_async=True)
                out, other = warpgroup_mma_wait(0, deps=[out, other])
            else:
                out = warpgroup_mma_wait(0, deps=[out])
        done(free)
        if STATES:  # `done` has a barrier, so `state_s` is complete
            for h in gl.static_range(CHAINS):
                at = at_tile(states + tile * (128 * V), 0, column + h * 64, V, COPY_PAIRS, 128, 64)
                gl.store(at, state_s.index(h).load(COPY_PAIRS))
        if O:
            room = reinterpret(q_s.index(i), gl.bfloat16, [2, 64, 64], SHARED)
            room.index(0).permute((1, 0)).store(out.to(gl.bfloat16))
            if CHAINS == 2:
                room.index(1).permute((1, 0)).store(other.to(gl.bfloat16))
            barrier()
            for h in gl.static_range(CHAINS):
                write_block(o, token, m * V + column + h * 64, stop, M * V, room.index(h), STEPS)
            done(empty_late.index(i))
        if U:
            mbarrier.wait(ready_u, c & 1)
            for h in gl.static_range(CHAINS):
                write_block(u, token, m * V + column + h * 64, stop, M * V, u_s.index(h))
            done(free_u)
        elif STATES and not O:
            barrier()


@gluon.jit
def scan_forward(
    q,
    k,
    v,
    inverse,
    scores,
    gates,
    initial,
    o,
    u,
    states,
    final,
    segments,
    scale,
    M: gl.constexpr,
    E: gl.constexpr,
    R: gl.constexpr,
    STEPS: gl.constexpr,
    V: gl.constexpr,
    CHAINS: gl.constexpr,
):
    BLOCKS: gl.constexpr = V // (64 * CHAINS)
    AHEAD: gl.constexpr = 4 - CHAINS  # buffers of what the chains read
    column = (gl.program_id(0) % BLOCKS) * (64 * CHAINS)
    recurrence = gl.program_id(0) // BLOCKS
    n, m = recurrence // M, recurrence % M
    start = gl.load(segments + n * 5)
    stop = start + gl.load(segments + n * 5 + 1)
    first = gl.load(segments + n * 5 + 2)
    state = recurrence.to(gl.int64) * (128 * V)
    O: gl.constexpr = o is not None
    U: gl.constexpr = u is not None
    STATES: gl.constexpr = states is not None
    SCORES: gl.constexpr = scores is not None
    INITIAL: gl.constexpr = initial is not None
    FINAL: gl.constexpr = final is not None

    k_s = gl.allocate_shared_memory(gl.bfloat16, [AHEAD, 64, 128], SHARED)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [AHEAD * CHAINS, 64, 64], SHARED)
    inverse_s = gl.allocate_shared_memory(gl.bfloat16 if SCORES else gl.float16, [AHEAD, 64, 64], SHARED)
    gates_s = gl.allocate_shared_memory(gl.float32, [AHEAD, 256], FLAT)
    q_s = gl.allocate_shared_memory(gl.bfloat16, [LATE, 64, 128], SHARED)
    scores_s = gl.allocate_shared_memory(gl.bfloat16, [LATE, 64, 64], SHARED)
    before_s = gl.allocate_shared_memory(gl.bfloat16, [CHAINS, 64, 128], SHARED)
    w_s = gl.allocate_shared_memory(gl.bfloat16, [CHAINS, 64, 64], SHARED)
    u_s, solve_s, state_s = w_s, w_s, before_s
    if U:
        u_s = gl.allocate_shared_memory(gl.bfloat16, [CHAINS, 64, 64], SHARED)
    if not SCORES:
        solve_s = gl.allocate_shared_memory(gl.bfloat16, [CHAINS, 64, 64], SHARED)
    if STATES:
        state_s = gl.allocate_shared_memory(gl.bfloat16, [CHAINS, 128, 64], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], mbarrier.MBarrierLayout())
    full_late = gl.allocate_shared_memory(gl.int64, [LATE, 1], mbarrier.MBarrierLayout())
    empty_late = gl.allocate_shared_memory(gl.int64, [LATE, 1], mbarrier.MBarrierLayout())
    handed = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    ready, free, ready_u, free_u = handed.index(0), handed.index(1), handed.index(2), handed.index(3)
    for i in gl.static_range(AHEAD):
        mbarrier.init(full.index(i), count=COPIERS)
        mbarrier.init(empty.index(i), count=CHAINS + (1 if O else 0))  # for outputs, the results read it too
    for i in gl.static_range(LATE):
        mbarrier.init(full_late.index(i), count=COPIERS)
        mbarrier.init(empty_late.index(i), count=1)
    mbarrier.init(ready, count=CHAINS)
    mbarrier.init(free, count=1)
    mbarrier.init(ready_u, count=CHAINS)
    mbarrier.init(free_u, count=1)
    barrier()
    # The arguments are written out for each case, because Gluon loses the constants of a tuple that has a name.
    if CHAINS == 2:
        gl.warp_specialize(
            [
                (
                    chain,
                    (
                        initial, final, k_s, v_s, inverse_s, gates_s, solve_s, before_s, w_s, u_s,
                        full, empty, ready, free, ready_u, free_u, start, stop, column, state,
                        V, 0, CHAINS, AHEAD, INITIAL, FINAL, U, SCORES,
                    ),
                ),
                (
                    chain,
                    (
                        initial, final, k_s, v_s, inverse_s, gates_s, solve_s, before_s, w_s, u_s,
                        full, empty, ready, free, ready_u, free_u, start, stop, column, state,
                        V, 1, CHAINS, AHEAD, INITIAL, FINAL, U, SCORES,
                    ),
                ),
                (
                    results,
                    (
                        o, u, states, q_s, k_s, inverse_s, gates_s, scores_s, before_s, w_s, u_s, state_s,
                        full, empty, full_late, empty_late, ready, free, ready_u, free_u,
                        first, start, stop, m, column, scale, M, STEPS, V, CHAINS, AHEAD, O, U, STATES, SCORES,
                    ),
                ),
                (
                    copies,
                    (
                        q, k, v, inverse, scores, gates,
                        q_s, k_s, v_s, inverse_s, scores_s, gates_s, full, empty, full_late, empty_late,
                        first, start, stop, m, column, M, E, R, STEPS, V, CHAINS, AHEAD, O, SCORES,
                    ),
                ),
            ],
            [4, 4, 4],
            [160, 136, 56],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    chain,
                    (
                        initial, final, k_s, v_s, inverse_s, gates_s, solve_s, before_s, w_s, u_s,
                        full, empty, ready, free, ready_u, free_u, start, stop, column, state,
                        V, 0, CHAINS, AHEAD, INITIAL, FINAL, U, SCORES,
                    ),
                ),
                (
                    results,
                    (
                        o, u, states, q_s, k_s, inverse_s, gates_s, scores_s, before_s, w_s, u_s, state_s,
                        full, empty, full_late, empty_late, ready, free, ready_u, free_u,
                        first, start, stop, m, column, scale, M, STEPS, V, CHAINS, AHEAD, O, U, STATES, SCORES,
                    ),
                ),
                (
                    copies,
                    (
                        q, k, v, inverse, scores, gates,
                        q_s, k_s, v_s, inverse_s, scores_s, gates_s, full, empty, full_late, empty_late,
                        first, start, stop, m, column, M, E, R, STEPS, V, CHAINS, AHEAD, O, SCORES,
                    ),
                ),
            ],
            [4, 4],
            [168, 88],
        )  # fmt: skip
