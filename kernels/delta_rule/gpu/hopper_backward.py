"""All gradients of the (gated) delta rule in one pass from the last chunk to the first: Hopper, in Gluon.

The equations are those of `sequential_pass.py` and `chunk_gradients.py`. There, the gradient of the state goes through
memory, and the streams are read by three kernels; here one program has a whole state and reads each stream once:

    load k, dO, inverse, scores            dU = e^{b_C − b} ⊙ K dS,  dV = scoresᵀ dO + inverseᵀ dU
    load q, U, S                           X = D ⊙ dO Uᵀ,  M = −D ⊙ dV Uᵀ
    dS ← e^{b_C} dS + (e^b Q)ᵀ dO − (e^b K)ᵀ dV
    dQ = X K + e^b ⊙ dO Sᵀ                 dK = Xᵀ Q + (M + Mᵀ) K + e^{b_C − b} ⊙ U dSᵀ − e^b ⊙ dV Sᵀ

A chunk's loads of the first line are a chunk ahead (two buffers), those of the second are issued as soon as the chunk
before has read the buffer for the last time. It pays where there are recurrences enough to fill the device.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ...gpu.gluon_tiles import (
    COPY,
    FLAT,
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
    copy_pairs,
    copy_state,
    copy_tokens,
    store_rows,
)

LEAST_BETA = gl.constexpr(2.0**-50)
COPY_GATES = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
# sums of halves of the columns of `QUADS`
HALVES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[8, 0]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0], [0, 1]], [], [64, 2]
    )
)


@gluon.jit
def copy_gates(shared, x, tile):
    async_load(shared, x + (tile * 256 + gl.arange(0, 256, COPY_GATES)))


@gluon.jit
def write_rows(x, token, column, stop, stride: gl.constexpr, tile):
    """Store a tile [64, 128] that is in shared memory."""
    r = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, COPY)), 1)
    gl.store(at_tile(x, token, column, stride, COPY, 64, 128), tile.load(COPY), mask=r < stop - token)


@gluon.jit
def halves(x):
    """Sums over each half of the columns of a tile, [64, 2], for which no warp needs another."""
    C: gl.constexpr = x.shape[1] // 2
    return gl.convert_layout(gl.sum(gl.reshape(x, [64, 2, C]), 2), HALVES)


@gluon.jit
def at_halves():
    """Pointers to the sums of both halves of a chunk, as [2, 64]."""
    r = gl.arange(0, 64, gl.SliceLayout(1, HALVES))
    return gl.expand_dims(r, 1) + gl.expand_dims(gl.arange(0, 2, gl.SliceLayout(0, HALVES)) * 64, 0)


@gluon.jit
def quarters(x):
    """Sums over each quarter of the rows of a tile [64, 64], [4, 64], for which no warp needs another."""
    return gl.sum(gl.reshape(x, [4, 16, 64]), 1)


@gluon.jit
def gradients(
    q,
    k,
    u,
    do,
    beta,
    inverse,
    scores,
    gates,
    states,
    dfinal,
    dq,
    dk,
    dv,
    dbeta,
    from_columns,
    from_t,
    before_t,
    across,
    dinitial,
    segments,
    scale,
    M: gl.constexpr,
    E: gl.constexpr,
    R: gl.constexpr,
    STEPS: gl.constexpr,
):
    recurrence = gl.program_id(0)
    n, m = recurrence // M, recurrence % M
    start = gl.load(segments + n * 5)
    stop = start + gl.load(segments + n * 5 + 1)
    first = gl.load(segments + n * 5 + 2)
    keys: gl.constexpr = M // R  # heads of q and k
    values: gl.constexpr = M // E  # and of v
    of_keys, of_values, of_m = ((m // (E * R)) * E + m % E) * 128, (m // E) * 128, m * 128
    chunks = gl.cdiv(stop - start, 64)

    keys_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 128], SHARED)
    do_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 128], SHARED)
    inverse_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], SHARED)  # then M
    scores_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], SHARED)  # then X
    gates_s = gl.allocate_shared_memory(gl.float32, [2, 256], FLAT)
    queries_s = gl.allocate_shared_memory(gl.bfloat16, [64, 128], SHARED)
    u_s = gl.allocate_shared_memory(gl.bfloat16, [64, 128], SHARED)
    state_s = gl.allocate_shared_memory(gl.bfloat16, [128, 128], SHARED)
    after_s = gl.allocate_shared_memory(gl.bfloat16, [128, 128], SHARED)
    new_s = gl.allocate_shared_memory(gl.bfloat16, [64, 128], SHARED)  # dU, then dV, then −e^b dV

    row = gl.arange(0, 128, gl.SliceLayout(1, STATE))
    column = gl.arange(0, 128, gl.SliceLayout(0, STATE))
    offsets = gl.expand_dims(row * 128, 1) + gl.expand_dims(column, 0)
    end = recurrence.to(gl.int64) * (128 * 128)
    dS = gl.zeros([128, 128], gl.float32, STATE)
    if dfinal is not None:
        dS = gl.load(dfinal + end + offsets).to(gl.float32)

    if chunks > 0:
        token = start + (chunks - 1) * 64
        tile = (first + chunks - 1).to(gl.int64) * M + m
        copy_tokens(keys_s.index(0), k, token, of_keys, stop, keys * 128)
        copy_tokens(do_s.index(0), do, token, of_values, stop, values * 128, COPY, STEPS)
        copy_pairs(inverse_s.index(0), inverse, tile)
        copy_pairs(scores_s.index(0), scores, tile)
        copy_gates(gates_s.index(0), gates, tile)
        async_copy.commit_group()
        copy_tokens(u_s, u, token, of_m, stop, M * 128)
        copy_tokens(queries_s, q, token, of_keys, stop, keys * 128, COPY, STEPS)
        copy_state(state_s, states, tile, True)
        async_copy.commit_group()
    rows, pairs = gl.zeros([64, 128], gl.float32, ROWS), gl.zeros([64, 64], gl.float32, PAIRS)
    r = gl.expand_dims(gl.arange(0, 64, OF_ROWS), 1)
    below = r > gl.expand_dims(gl.arange(0, 64, OF_COLUMNS), 0)
    diagonal = r == gl.expand_dims(gl.arange(0, 64, OF_COLUMNS), 0)
    for i in range(chunks):
        token = start + (chunks - 1 - i) * 64
        tile = (first + chunks - 1 - i).to(gl.int64) * M + m
        keys_here, do_here = keys_s.index(i % 2), do_s.index(i % 2)
        solve, weights, gates_here = inverse_s.index(i % 2), scores_s.index(i % 2), gates_s.index(i % 2)
        after_s.store(dS.to(gl.bfloat16))
        async_copy.wait_group(1)
        fence_async_shared()
        barrier()
        dU = warpgroup_mma(keys_here, after_s, rows, use_acc=False, is_async=True)
        dV = warpgroup_mma(weights.permute((1, 0)), do_here, rows, use_acc=False, is_async=True)
        # the next chunk's; nobody reads what was there
        more = i + 1 < chunks
        if more:
            copy_tokens(keys_s.index((i + 1) % 2), k, token - 64, of_keys, stop, keys * 128)
            copy_tokens(do_s.index((i + 1) % 2), do, token - 64, of_values, stop, values * 128, COPY, STEPS)
            copy_pairs(inverse_s.index((i + 1) % 2), inverse, tile - M)
            copy_pairs(scores_s.index((i + 1) % 2), scores, tile - M)
            copy_gates(gates_s.index((i + 1) % 2), gates, tile - M)
        async_copy.commit_group()
        keep = gl.expand_dims(gates_here.slice(64, 64).load(OF_TOKENS), 1)
        dU = warpgroup_mma_wait(1, deps=[dU])
        new_s.store((dU * keep).to(gl.bfloat16))
        fence_async_shared()
        dV = warpgroup_mma(solve.permute((1, 0)), new_s, dV, is_async=True)

        async_copy.wait_group(1)
        fence_async_shared()
        barrier()
        X = warpgroup_mma(do_here, u_s.permute((1, 0)), pairs, use_acc=False, is_async=True)
        total = gates_here.slice(63, 1).load(gl.SliceLayout(1, STATE))
        if from_t is not None:
            way = gl.sum(state_s.load(STATE).to(gl.float32) * dS, 1) * total
            gl.store(across + tile * 128 + gl.arange(0, 128, gl.SliceLayout(1, STATE)), way)
        dV = warpgroup_mma_wait(1, deps=[dV])
        new_s.store(dV.to(gl.bfloat16))
        fence_async_shared()
        lower = warpgroup_mma(new_s, u_s.permute((1, 0)), pairs, use_acc=False, is_async=True)
        write_rows(dv, token, of_m, stop, M * 128, new_s)
        high, low = gates_here.slice(128, 64), gates_here.slice(192, 64)
        difference = gl.expand_dims(high.load(OF_ROWS), 1) - gl.expand_dims(high.load(OF_COLUMNS), 0)
        difference += gl.expand_dims(low.load(OF_ROWS), 1) - gl.expand_dims(low.load(OF_COLUMNS), 0)
        D = gl.where(below, gl.exp2(-gl.abs(difference)), 0.0)
        X = warpgroup_mma_wait(1, deps=[X])
        weights.store((X * D * scale).to(gl.bfloat16))
        shrink = gl.expand_dims(gates_here.slice(0, 64).load(OF_TOKENS), 1)
        do_here.store((do_here.load(ROWS).to(gl.float32) * (shrink * scale)).to(gl.bfloat16))
        own = gl.sum(gl.where(diagonal, X, 0.0), 1) * scale
        lower = warpgroup_mma_wait(0, deps=[lower])
        new_s.store((new_s.load(ROWS).to(gl.float32) * -shrink).to(gl.bfloat16))
        solve.store((-lower * D).to(gl.bfloat16))
        fence_async_shared()
        dS = warpgroup_mma(queries_s.permute((1, 0)), do_here, dS * gl.expand_dims(total, 1), is_async=True)
        dS = warpgroup_mma(keys_here.permute((1, 0)), new_s, dS, is_async=True)
        if from_t is not None:
            overlap = warpgroup_mma(keys_here, keys_here.permute((1, 0)), pairs, use_acc=False, is_async=True)
        dK = warpgroup_mma(weights.permute((1, 0)), queries_s, rows, use_acc=False, is_async=True)

        per_step = token.to(gl.int64) * M + m
        here = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, HALVES)), 1)
        mine = here // 32 == gl.expand_dims(gl.arange(0, 2, gl.SliceLayout(0, HALVES)), 0)
        mine = mine & (here < stop - token)
        at_beta = per_step + here * M + mine * 0
        write = gl.load(beta + at_beta, mask=mine, other=1.0).to(gl.float32)
        write = 1.0 / gl.where(gl.abs(write) < LEAST_BETA, LEAST_BETA, write)
        gl.store(dbeta + at_beta, halves(gl.where(diagonal, lower, 0.0)) * write * write, mask=mine)
        if from_t is not None:
            overlap = warpgroup_mma_wait(1, deps=[overlap])
            lower *= D * overlap
            later = -halves(lower)
            by_columns = quarters(lower)
            OUT: gl.constexpr = by_columns.type.layout
            at = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(1, OUT)) * 64, 1) + gl.expand_dims(
                gl.arange(0, 64, gl.SliceLayout(0, OUT)), 0
            )
            gl.store(from_columns + tile * 256 + at, by_columns)
        own = gl.expand_dims(gl.convert_layout(own, OF_TOKENS), 1)
        dS, dK = warpgroup_mma_wait(0, deps=[dS, dK])
        dQ = warpgroup_mma(do_here, state_s.permute((1, 0)), rows, use_acc=False, is_async=True)
        dQ = warpgroup_mma(weights, keys_here, dQ, is_async=True)
        if from_t is not None:
            later -= 2.0 * halves(dK * keys_here.load(ROWS).to(gl.float32))
        dK = warpgroup_mma(new_s, state_s.permute((1, 0)), dK, is_async=True)
        dQ = warpgroup_mma_wait(1, deps=[dQ])
        if from_t is not None:
            later += halves(dQ * queries_s.load(ROWS).to(gl.float32))
        dQ += own * keys_here.load(ROWS).to(gl.float32)
        store_rows(dq, token, of_m, stop, M * 128, dQ, STEPS)
        dU = warpgroup_mma(u_s, after_s.permute((1, 0)), rows, use_acc=False, is_async=True)
        dK = warpgroup_mma_wait(1, deps=[dK])
        if from_t is not None:
            later += halves(dK * keys_here.load(ROWS).to(gl.float32))
            gl.store(from_t + tile * 128 + at_halves(), later)
        dK += own * queries_s.load(ROWS).to(gl.float32)
        dU = warpgroup_mma_wait(0, deps=[dU])
        if more:
            copy_tokens(u_s, u, token - 64, of_m, stop, M * 128)
            copy_tokens(queries_s, q, token - 64, of_keys, stop, keys * 128, COPY, STEPS)
            copy_state(state_s, states, tile - M, True)
        async_copy.commit_group()
        dU *= keep
        dK = warpgroup_mma(solve, keys_here, dK + dU, is_async=True)
        dK = warpgroup_mma(solve.permute((1, 0)), keys_here, dK, is_async=True)
        if from_t is not None:
            gl.store(before_t + tile * 128 + at_halves(), halves(dU * keys_here.load(ROWS).to(gl.float32)))
        dK = warpgroup_mma_wait(0, deps=[dK])
        store_rows(dk, token, of_m, stop, M * 128, dK)
    gl.store(dinitial + end + offsets, dS)
