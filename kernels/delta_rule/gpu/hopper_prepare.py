"""Preparation of the chunks of the (gated) delta rule, as in `prepare.py`, in Gluon: Hopper, bf16, keys of 128
channels.

With N the strict lower part of D ⊙ K Kᵀ, everything follows from one symmetric form of the inverse:

    H = (β + βNβ)⁻¹      inverse = (I + βN)⁻¹ β = β H β      scores = (scale · D ⊙ Q Kᵀ) (β H) β

H is 1/β on the diagonal. β H and H β have ones there and do not shrink with β in any row, so both keep their precision
in fp16, whose mantissa is as long as that of tf32. For keys of length one and β ≤ 2, none of their numbers is above 2.
Blocks of 16 tokens are solved by substitution in fp32, one in each warp, without memory. Two rounds merge neighbours by
H ← H − (H β) N (β H), N being what is between them. Four programs fit on a multiprocessor.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ...gpu.gluon_tiles import FLAT, SHARED, at_tile, barrier, copy_tokens, reinterpret
from .hopper_groups import COPY, OF_COLUMNS, OF_PAIRS, OF_ROWS, PAIRS

LEAST_BETA = gl.constexpr(2.0**-50)  # as in prepare.py
LOG2E = gl.constexpr(1.4426950408889634)
LEAST = gl.constexpr(-152.0)  # as in tiles.py
ONCE = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))  # each warp has all 64
# blocks of 16 tokens, one for each warp: as in PAIRS, a thread has 2 rows and of each 2 neighbours and 2 more
BLOCKS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [8, 0], [0, 8]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 16]
    )
)
# 8 neighbours to a thread, which it gets from its quad
QUADS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 64],
    )
)


def elimination() -> str:
    """PTX that solves for H, in a thread's eight numbers of a block of 16 tokens (layout BLOCKS).

    Row j is subtracted from all rows below once it is final: H_i ← H_i − (Nβ)_ij H_j. Operands are the results, what
    they start from (1/β on the diagonal), and −Nβ. A thread's quad has its rows; other quads, its columns.
    """
    lines = [f"mov.f32 ${i}, ${8 + i};" for i in range(8)]
    for j in range(15):
        half, parity = j // 8, j % 2
        columns = (0, 1) if half == 0 else (0, 1, 4, 5)  # in the others, row j is zero
        rows = (0, 2) if half == 0 else (2,)  # those below row j, among 8 rows each
        for row in rows:
            lines.append(f"shfl.sync.idx.b32 c{row}, ${16 + 4 * half + row + parity}, {j % 8 // 2}, 0x1c1f, -1;")
        for column in columns:
            lines.append(f"shfl.sync.idx.b32 r{column}, ${column + 2 * half}, {j % 8 * 4}, 0x031f, -1;")
        for row in rows:
            lines += [f"fma.rn.f32 ${row + column}, c{row}, r{column}, ${row + column};" for column in columns]
    return "{ .reg .f32 c0, c2, r0, r1, r4, r5; " + " ".join(lines) + " }"


ELIMINATION, OPERANDS = gl.constexpr(elimination()), gl.constexpr(",".join(["=&f"] * 8 + ["f"] * 16))


@gluon.jit
def add(x, y):
    return x + y


@gluon.jit
def store_pairs(x, tile, value):
    """Store a tile [64, 64] of 2 bytes a number, 16 bytes a thread."""
    gl.store(at_tile(x, tile * 64, 0, 64, QUADS, 64, 64), gl.convert_layout(value, QUADS))


@gluon.jit
def solved_blocks(N, diagonal):
    """The inverses H of the blocks of 16 on the diagonal of a lower triangular matrix [64, 64], zero elsewhere.

    Args:
        N: The products that are subtracted: H_i = start_i + Σ_j N_ij H_j, j < i.
        diagonal: What row i starts from, on the diagonal [64].
    """
    in_blocks = gl.reshape(N, [64, 4, 16])
    LAYOUT: gl.constexpr = in_blocks.type.layout
    of_row = gl.expand_dims(gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))), 1), 2)
    of_block = gl.expand_dims(gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))), 0), 2)
    mine = of_row // 16 == of_block
    block = gl.sum(gl.where(mine, in_blocks, 0.0), 1)
    WHOLE: gl.constexpr = block.type.layout
    row = gl.arange(0, 64, gl.SliceLayout(1, BLOCKS))
    same = gl.expand_dims(row % 16, 1) == gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(0, BLOCKS)), 0)
    start = gl.where(same, gl.expand_dims(diagonal, 1), 0.0)
    block = gl.inline_asm_elementwise(
        ELIMINATION, OPERANDS, [start, gl.convert_layout(block, BLOCKS)], dtype=gl.float32, is_pure=True, pack=8
    )
    block = gl.expand_dims(gl.convert_layout(block, WHOLE), 1)
    return gl.convert_layout(gl.reshape(gl.where(mine, block, 0.0), [64, 64]), PAIRS)


@gluon.jit
def merged(H, n_s, x_s, beta_of_rows, beta_of_columns, here):
    """H of blocks twice as large, from that of blocks whose neighbours are `here`; n_s has −N."""
    x_s.store((beta_of_rows * H).to(gl.float16))
    Y = gl.convert_layout((H * beta_of_columns).to(gl.float16), OF_PAIRS)
    fence_async_shared()
    P = gl.zeros([64, 64], gl.float32, PAIRS)
    P = warpgroup_mma(Y, n_s, P, use_acc=False, is_async=True)
    P = warpgroup_mma_wait(0, deps=[P])
    P = gl.convert_layout(gl.where(here, P, 0.0).to(gl.float16), OF_PAIRS)
    H = warpgroup_mma(P, x_s, H, is_async=True)
    return warpgroup_mma_wait(0, deps=[H])


@gluon.jit
def prepare(
    q,
    k,
    log_decay,
    beta,
    inverse,  # without scores, β H in fp16
    scores,
    gates,  # e^b, e^{b_C − b} (without scores, β), and b in two parts
    bounds,  # [chunks,M], if sequences are cut
    chunks,
    scale,
    M: gl.constexpr,
    E: gl.constexpr,
    R: gl.constexpr,
    STEPS: gl.constexpr,
    GATE: gl.constexpr,
):
    chunk, m = gl.program_id(0) // M, gl.program_id(0) % M
    tile = gl.program_id(0).to(gl.int64)
    token = gl.load(chunks + chunk * 2)
    stop = token + gl.load(chunks + chunk * 2 + 1)
    keys: gl.constexpr = M // R  # heads of q and k
    head = ((m // (E * R)) * E + m % E) * 128
    keys_s = gl.allocate_shared_memory(gl.bfloat16, [64, 128], SHARED)
    SCORES: gl.constexpr = scores is not None
    pairs_s = gl.allocate_shared_memory(gl.float16, [2 if SCORES else 1, 64, 64], SHARED)
    numbers_s = gl.allocate_shared_memory(gl.float32, [256], FLAT)  # b in two parts, and β
    copy_tokens(keys_s, k, token, head, stop, keys * 128, COPY)
    if SCORES:
        queries_s = reinterpret(pairs_s, gl.bfloat16, [64, 128], SHARED)
        copy_tokens(queries_s, q, token, head, stop, keys * 128, COPY, STEPS)
    async_copy.commit_group()

    t = gl.arange(0, 64, ONCE)
    valid = t < stop - token
    per_step = token.to(gl.int64) * M + t * M + m
    of_token, is_first = per_step, valid
    if STEPS > 1:  # a token decays in its first step
        of_token = ((token + t) // STEPS).to(gl.int64) * M + m
        is_first = valid & ((token + t) % STEPS == 0)
    if GATE == "none":
        g = gl.zeros([64], gl.float64, ONCE)
    elif GATE == "constant":
        g = gl.where(is_first, gl.load(log_decay + m).to(gl.float64) * LOG2E, 0.0)
    else:
        g = gl.load(log_decay + of_token, mask=is_first, other=0.0).to(gl.float64) * LOG2E
    write = gl.load(beta + per_step, mask=valid, other=0.0).to(gl.float32)
    write = gl.where(gl.abs(write) < LEAST_BETA, LEAST_BETA, write)
    g = gl.where(g < LEAST, LEAST, g)
    b = gl.associative_scan(g, 0, add)
    high = b.to(gl.float32)
    low = (b - high.to(gl.float64)).to(gl.float32)
    numbers_s.slice(0, 64).store(high)
    numbers_s.slice(64, 64).store(low)
    numbers_s.slice(128, 64).store(write)
    at = gates + (tile * 256 + t)
    gl.store(at, gl.exp2(high))
    gl.store(at + 64, gl.exp2((gl.sum(g, 0) - b).to(gl.float32)) if SCORES else write)
    gl.store(at + 128, high)
    gl.store(at + 192, low)

    zeros = gl.zeros([64, 64], gl.float32, PAIRS)
    async_copy.wait_group(0)
    fence_async_shared()
    barrier()
    overlap = warpgroup_mma(keys_s, keys_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if SCORES:
        dots = warpgroup_mma(queries_s, keys_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
    difference = gl.expand_dims(numbers_s.slice(0, 64).load(OF_ROWS), 1) - gl.expand_dims(
        numbers_s.slice(0, 64).load(OF_COLUMNS), 0
    )
    difference += gl.expand_dims(numbers_s.slice(64, 64).load(OF_ROWS), 1) - gl.expand_dims(
        numbers_s.slice(64, 64).load(OF_COLUMNS), 0
    )
    r = gl.expand_dims(gl.arange(0, 64, OF_ROWS), 1)
    c = gl.expand_dims(gl.arange(0, 64, OF_COLUMNS), 0)
    D = gl.where(r >= c, gl.exp2(-gl.abs(difference)), 0.0)
    if SCORES:
        overlap, dots = warpgroup_mma_wait(0, deps=[overlap, dots])
    else:
        overlap = warpgroup_mma_wait(0, deps=[overlap])
    if bounds is not None:
        length = gl.sum(gl.where(r == c, overlap, 0.0), 1)
        beyond = gl.abs(1.0 - numbers_s.slice(128, 64).load(OF_ROWS) * length)
        growth = gl.sum(gl.log2(gl.maximum(beyond, 1.0)), 0)
        gl.store(bounds + tile, gl.sum(g, 0).to(gl.float32) + growth)
    barrier()  # nobody reads keys and queries any more
    n_s = pairs_s.index(0)
    x_s = reinterpret(keys_s, gl.float16, [2, 64, 64], SHARED)
    if SCORES:
        dots_s = pairs_s.index(1)
        dots_s.store((dots * D).to(gl.float16))
    N = gl.where(r > c, -(overlap * D), 0.0)
    n_s.store(N.to(gl.float16))

    N *= gl.expand_dims(numbers_s.slice(128, 64).load(OF_COLUMNS), 0)
    H = solved_blocks(N, 1.0 / numbers_s.slice(128, 64).load(gl.SliceLayout(1, BLOCKS)))
    beta_of_columns = gl.expand_dims(numbers_s.slice(128, 64).load(OF_COLUMNS), 0)
    beta_of_rows = gl.expand_dims(numbers_s.slice(128, 64).load(OF_ROWS), 1)
    H = merged(H, n_s, x_s.index(0), beta_of_rows, beta_of_columns, (r // 32 == c // 32) & (r // 16 != c // 16))
    H = merged(H, n_s, x_s.index(1), beta_of_rows, beta_of_columns, r // 32 != c // 32)

    H *= beta_of_rows
    if SCORES:
        x_s.index(0).store(H.to(gl.float16))
        fence_async_shared()
        weights = warpgroup_mma(dots_s, x_s.index(0), zeros, use_acc=False, is_async=True)
        # before anything else: what a store needs of shared memory may be where the product reads
        weights = warpgroup_mma_wait(0, deps=[weights])
        store_pairs(inverse, tile, (H * beta_of_columns).to(gl.bfloat16))
        store_pairs(scores, tile, (weights * (beta_of_columns * scale)).to(gl.bfloat16))
    else:
        store_pairs(inverse, tile, H.to(gl.float16))
