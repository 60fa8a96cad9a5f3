"""The forward pass along time of `sequential_pass.py` in Gluon: Hopper, bf16, keys of 128 channels.

Three groups of warps share the work, so that the next chunk waits for nothing but the state:

    copies     bring the tiles of the chunks ahead into rings of buffers
    chain      W = βV − Ã S, U = inverse W, S ← e^{b_C} S + K̂ᵀ U: all that the next chunk needs
    results    O = Q̃ S + scores W; store O, the state and U

As in `sequential_pass.py`, everything is transposed: a block of 64 values is the rows of all products. The chain keeps
its left operands in registers and hands S, W and U over in shared memory. O is written out by way of the buffer that
had the scores.
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

from ....gpu.gluon_tiles import FLAT, SHARED, async_load, at_tile, barrier, copy_pairs, copy_tokens, done
from ..hopper_groups import (
    COPIERS,
    COPY,
    COPY_PAIRS,
    OF_PAIRS,
    OF_STATE,
    PAIRS,
    STATE,
    copy_block,
    in_state,
    write_block,
)

AHEAD = gl.constexpr(3)  # buffers of what the chain reads
LATE = gl.constexpr(2)  # and of what the results alone read
COPY_TOTAL = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))
ONCE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def strength(beta, token, stop, m, M: gl.constexpr):
    """β of the 64 tokens from `token` on, 0 from token `stop` on."""
    t = gl.arange(0, 64, ONCE)
    at = beta + (token.to(gl.int64) * M + m + t * M)
    return gl.load(at, mask=t < stop - token, other=0.0).to(gl.float32)


@gluon.jit
def copies(
    v, inverse, scores, read_q, read_a, keep, total,
    a_s, q_s, k_s, v_s, inverse_s, scores_s, total_s, full, empty, full_late, empty_late,
    first, start, stop, m, column,
    M: gl.constexpr, E: gl.constexpr, STEPS: gl.constexpr, V: gl.constexpr, O: gl.constexpr,
):  # fmt: skip
    """Bring all tiles."""
    for c in range(gl.cdiv(stop - start, 64)):
        token = start + c * 64
        tile = (first + c).to(gl.int64) * M + m
        i = c % AHEAD
        mbarrier.wait(empty.index(i), ((c // AHEAD) & 1) ^ 1)
        copy_tokens(a_s.index(i), read_a, token, m * 128, stop, M * 128, COPY)
        copy_block(v_s.index(i), v, token, (m // E) * V + column, stop, M // E * V)
        copy_pairs(inverse_s.index(i), inverse, tile, COPY_PAIRS)
        copy_tokens(k_s.index(i), keep, token, m * 128, stop, M * 128, COPY)
        async_load(total_s.index(i), total + (tile * 128 + gl.arange(0, 128, COPY_TOTAL)))
        async_copy.mbarrier_arrive(full.index(i), increment_count=False)
        if O:
            i = c % LATE
            mbarrier.wait(empty_late.index(i), ((c // LATE) & 1) ^ 1)
            copy_tokens(q_s.index(i), read_q, token, m * 128, stop, M * 128, COPY, STEPS)
            copy_pairs(scores_s.index(i), scores, tile, COPY_PAIRS)
            async_copy.mbarrier_arrive(full_late.index(i), increment_count=False)


@gluon.jit
def chain(
    beta, initial, final, a_s, k_s, v_s, inverse_s, total_s, write_s, before_s, w_s, u_s,
    full, empty, ready, free, ready_u, free_u, start, stop, m, column, state,
    M: gl.constexpr, V: gl.constexpr, BETA: gl.constexpr, INITIAL: gl.constexpr, U: gl.constexpr,
):  # fmt: skip
    """Carry the state."""
    offsets = in_state(column, V)
    S = gl.zeros([64, 128], gl.float32, STATE)
    if INITIAL:
        S = gl.load(initial + state + offsets).to(gl.float32)
    none = gl.zeros([64, 64], gl.float32, PAIRS)
    if BETA:
        write_s.index(0).store(strength(beta, start, stop, m, M))
    for c in range(gl.cdiv(stop - start, 64)):
        i = c % AHEAD
        if BETA:
            following = strength(beta, start + c * 64 + 64, stop, m, M)
        before = S.to(gl.bfloat16)
        mbarrier.wait(full.index(i), (c // AHEAD) & 1)
        fence_async_shared()
        read = warpgroup_mma(
            gl.convert_layout(before, OF_PAIRS), a_s.index(i).permute((1, 0)), none, use_acc=False, is_async=True
        )
        W = v_s.index(i).permute((1, 0)).load(PAIRS).to(gl.float32)
        if BETA:
            W *= gl.expand_dims(write_s.index(c % 2).load(gl.SliceLayout(0, PAIRS)), 0)
        mbarrier.wait(free, (c & 1) ^ 1)
        before_s.store(before)
        read = warpgroup_mma_wait(0, deps=[read])
        W = (W - read).to(gl.bfloat16)
        new = warpgroup_mma(
            gl.convert_layout(W, OF_PAIRS), inverse_s.index(i).permute((1, 0)), none, use_acc=False, is_async=True
        )
        w_s.store(W)
        fence_async_shared()
        done(ready)
        S *= gl.expand_dims(total_s.index(i).load(gl.SliceLayout(0, STATE)), 0)
        new = warpgroup_mma_wait(0, deps=[new])
        new = new.to(gl.bfloat16)
        S = warpgroup_mma(gl.convert_layout(new, OF_STATE), k_s.index(i), S, is_async=True)
        if U:
            mbarrier.wait(free_u, (c & 1) ^ 1)
            u_s.permute((1, 0)).store(new)
            done(ready_u)
        if BETA:
            write_s.index((c + 1) % 2).store(following)
        S = warpgroup_mma_wait(0, deps=[S])
        done(empty.index(i))
    gl.store(final + state + offsets, S)


@gluon.jit
def results(
    o, u, states, q_s, scores_s, before_s, w_s, u_s, full_late, empty_late, ready, free, ready_u, free_u,
    first, start, stop, m, column,
    M: gl.constexpr, STEPS: gl.constexpr, V: gl.constexpr, O: gl.constexpr, U: gl.constexpr, STATES: gl.constexpr,
):  # fmt: skip
    """Store what the pass leaves of each chunk."""
    none = gl.zeros([64, 64], gl.float32, PAIRS)
    for c in range(gl.cdiv(stop - start, 64)):
        token = start + c * 64
        tile = (first + c).to(gl.int64) * M + m
        i = c % LATE
        mbarrier.wait(ready, c & 1)
        if O:
            mbarrier.wait(full_late.index(i), (c // LATE) & 1)
            fence_async_shared()
            out = warpgroup_mma(before_s, q_s.index(i).permute((1, 0)), none, use_acc=False, is_async=True)
            out = warpgroup_mma(w_s, scores_s.index(i).permute((1, 0)), out, is_async=True)
        if STATES:
            gl.store(at_tile(states + tile * (128 * V), column, 0, 128, COPY, 64, 128), before_s.load(COPY))
        if O:
            out = warpgroup_mma_wait(0, deps=[out])
        done(free)
        if O:
            room = scores_s.index(i)
            room.permute((1, 0)).store(out.to(gl.bfloat16))
            barrier()
            write_block(o, token, m * V + column, stop, M * V, room, STEPS)
            done(empty_late.index(i))
        if U:
            mbarrier.wait(ready_u, c & 1)
            write_block(u, token, m * V + column, stop, M * V, u_s)
            done(free_u)


@gluon.jit
def scan_forward(
    v,
    beta,
    inverse,
    scores,
    read_q,
    read_a,
    keep,
    total,
    initial,
    o,
    u,
    states,
    final,
    segments,
    M: gl.constexpr,
    E: gl.constexpr,
    STEPS: gl.constexpr,
    V: gl.constexpr,
):
    BLOCKS: gl.constexpr = V // 64
    column = (gl.program_id(0) % BLOCKS) * 64
    recurrence = gl.program_id(0) // BLOCKS
    n, m = recurrence // M, recurrence % M
    start = gl.load(segments + n * 5)
    stop = start + gl.load(segments + n * 5 + 1)
    first = gl.load(segments + n * 5 + 2)
    state = recurrence.to(gl.int64) * (128 * V)
    O: gl.constexpr = o is not None
    U: gl.constexpr = u is not None
    STATES: gl.constexpr = states is not None
    BETA: gl.constexpr = beta is not None
    INITIAL: gl.constexpr = initial is not None

    a_s = gl.allocate_shared_memory(gl.bfloat16, [AHEAD, 64, 128], SHARED)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [AHEAD, 64, 128], SHARED)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [AHEAD, 64, 64], SHARED)
    inverse_s = gl.allocate_shared_memory(gl.bfloat16, [AHEAD, 64, 64], SHARED)
    total_s = gl.allocate_shared_memory(gl.float32, [AHEAD, 128], FLAT)
    q_s = gl.allocate_shared_memory(gl.bfloat16, [LATE, 64, 128], SHARED)
    scores_s = gl.allocate_shared_memory(gl.bfloat16, [LATE, 64, 64], SHARED)
    before_s = gl.allocate_shared_memory(gl.bfloat16, [64, 128], SHARED)
    w_s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    u_s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    write_s = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], mbarrier.MBarrierLayout())
    full_late = gl.allocate_shared_memory(gl.int64, [LATE, 1], mbarrier.MBarrierLayout())
    empty_late = gl.allocate_shared_memory(gl.int64, [LATE, 1], mbarrier.MBarrierLayout())
    handed = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(AHEAD):
        mbarrier.init(full.index(i), count=COPIERS)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(LATE):
        mbarrier.init(full_late.index(i), count=COPIERS)
        mbarrier.init(empty_late.index(i), count=1)
    for i in gl.static_range(4):
        mbarrier.init(handed.index(i), count=1)
    ready, free, ready_u, free_u = handed.index(0), handed.index(1), handed.index(2), handed.index(3)
    barrier()
    gl.warp_specialize(
        [
            (
                chain,
                (
                    beta, initial, final, a_s, k_s, v_s, inverse_s, total_s, write_s, before_s, w_s, u_s,
                    full, empty, ready, free, ready_u, free_u, start, stop, m, column, state,
                    M, V, BETA, INITIAL, U,
                ),
            ),
            (
                results,
                (
                    o, u, states, q_s, scores_s, before_s, w_s, u_s, full_late, empty_late,
                    ready, free, ready_u, free_u, first, start, stop, m, column, M, STEPS, V, O, U, STATES,
                ),
            ),
            (
                copies,
                (
                    v, inverse, scores, read_q, read_a, keep, total,
                    a_s, q_s, k_s, v_s, inverse_s, scores_s, total_s, full, empty, full_late, empty_late,
                    first, start, stop, m, column, M, E, STEPS, V, O,
                ),
            ),
        ],
        [4, 4],
        [168, 88],
    )  # fmt: skip
