"""The work of the general delta rule that is done chunk by chunk, in Gluon: Hopper, bf16, decays per channel.

`pair_products` computes what `prepare.py` does but for the inverse: P, L, Q̃, Ã, K̂ and e^{b_C}, in blocks of 64 keys.
`gradients` is that of `gradients.py`, for one such block. Letters as there; decays between tokens come by halves
(`gpu/gluon_halves.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ....gpu.gluon_halves import (
    LEAST,
    LINES,
    OCTETS,
    SAFE,
    allocate_middles,
    apart,
    around_middle,
    columns,
    copy_decays,
    copy_rows,
    copy_square,
    either,
    exp2,
    exponent_after,
    exponent_either,
    first_halves,
    first_steps,
    in_blocks,
    in_log2,
    load_log_decays,
    mark_of,
    middle_across,
    middle_inside,
    near_middle,
    plus,
    power,
    reciprocal,
    rows,
    square,
    store_middles,
    store_rows,
    times,
    truncated,
    whole_and_rest,
)
from ....gpu.gluon_tiles import FLAT, OF_COLUMNS, OF_ROWS, PAIRS, SHARED, at_tile, barrier, distance

OF_CHANNELS = gl.constexpr(gl.SliceLayout(0, OCTETS))
EIGHTS = gl.constexpr(gl.BlockedLayout([8, 2], [1, 32], [1, 8], [1, 0]))  # every warp has all of [8, 64]
OF_MIDDLES = gl.constexpr(gl.BlockedLayout([8, 4, 2], [1, 1, 32], [1, 1, 8], [2, 1, 0]))


@gluon.jit
def strength(beta, token, stop, m, M: gl.constexpr, LAYOUT: gl.constexpr):
    """β of the rows of a chunk [64, 1]."""
    r = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    at = beta + (token.to(gl.int64) * M + m + r * M)
    return gl.expand_dims(gl.load(at, mask=r < stop - token, other=0.0).to(gl.float32), 1)


@gluon.jit
def as_read(k_s, a_s, ERASE: gl.constexpr, PRODUCT: gl.constexpr, LAYOUT: gl.constexpr):
    """The erase keys without β, in fp32."""
    A = k_s.load(LAYOUT).to(gl.float32)
    if PRODUCT:
        A = A * a_s.load(LAYOUT).to(gl.float32)
    elif ERASE:
        A = a_s.load(LAYOUT).to(gl.float32)
    return A


@gluon.jit
def sums_of_chunk(ends_s, middles, g):
    """Store the reference points of log2 decays g in the layout `OCTETS`.

    Returns:
        The sums of the decays up to each token, those of the chunk [64], and 1 if a channel is too steep for one
        reference point in 16 tokens, else 0.
    """
    b = gl.associative_scan(g, 0, plus)
    ends_s.store(gl.sum(in_blocks(g, 8), 1))
    barrier()
    sums = ends_s.load(EIGHTS)
    store_middles(middles, gl.associative_scan(sums, 0, plus), OF_MIDDLES)
    steep = gl.min(gl.min(sums, 0), 0) < -SAFE
    return b, gl.convert_layout(gl.sum(sums, 0), OF_CHANNELS), steep.to(gl.int32)


@gluon.jit
def at_start(LAYOUT: gl.constexpr):
    """Return the reference point before the first token, for `exponent_after`."""
    return gl.zeros([64, 64], gl.int16, LAYOUT) + 127


@gluon.jit
def products_of_level(inside, middle, one, other, of_q, of_a, level, BEFORE: gl.constexpr):
    """Return the products of queries and of erase keys with keys, with those of a level for pairs that it separates."""
    read, written, erased, n, before = inside
    zeros = gl.zeros([64, 64], gl.float32, PAIRS)
    tile, e = around_middle(read, written, n, middle, level)
    one.store(tile)
    first = first_halves(level, PAIRS)
    if BEFORE:
        e = exponent_either(gl.where(first == 0, before, n), mark_of(middle, first), first)
    other.store(times(either(erased, written, first), e))
    fence_async_shared()
    barrier()
    next_q, next_a = square(one, zeros), square(other, zeros)
    next_q, next_a = warpgroup_mma_wait(0, deps=[next_q, next_a])
    barrier()
    here = apart() >> (5 - level) == 1
    return gl.where(here, next_q, of_q), gl.where(here, next_a, of_a)


@gluon.jit
def products_nearby(inside, middle, one, other, earlier, of_q, of_a, BEFORE: gl.constexpr):
    """Return such products with those of pairs in blocks of 16 tokens, for one reference point in each block."""
    read, written, erased, n, before = inside
    zeros = gl.zeros([64, 64], gl.float32, PAIRS)
    read, written, after, _ = near_middle(read, written, n, middle)
    one.store(read)
    earlier.store(written)
    if BEFORE:
        after = near_middle(erased, erased, before, middle)[2]
    other.store(times(erased, after))
    fence_async_shared()
    barrier()
    next_q = warpgroup_mma(one, earlier.permute((1, 0)), zeros, use_acc=False, is_async=True)
    next_a = warpgroup_mma(other, earlier.permute((1, 0)), zeros, use_acc=False, is_async=True)
    next_q, next_a = warpgroup_mma_wait(0, deps=[next_q, next_a])
    return gl.where(apart() < 16, next_q, of_q), gl.where(apart() < 16, next_a, of_a)


@gluon.jit
def bring(
    q, k, erase, log_decay, q_s, k_s, a_s, decays_s, tile, block, chunks,
    M: gl.constexpr, E: gl.constexpr, R: gl.constexpr, STEPS: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    """Start to copy a block of 64 keys of a chunk."""
    token = gl.load(chunks + tile // M * 2)
    stop = token + gl.load(chunks + tile // M * 2 + 1)
    m, column = tile % M, tile % M * K + block * 64
    head = ((m // (E * R)) * E + m % E) * K + block * 64
    copy_rows(q_s, q, token, head, stop, M // R * K, STEPS)
    copy_rows(k_s, k, token, head, stop, M // R * K)
    if erase is not None:
        copy_rows(a_s, erase, token, column, stop, M * K)
    copy_decays(decays_s, log_decay, token, column, stop, M * K, STEPS)


@gluon.jit
def pair_products(
    q,
    k,
    erase,  # [rows,M,K], or with PRODUCT factors on the keys; None if they are the keys
    beta,
    log_decay,
    products,  # [2,chunks,M,64,64]: L and scale · P
    read_q,  # [tokens,M,K]
    read_a,  # [rows,M,K], like keep
    keep,
    total,  # [chunks,M,K]
    chunks,
    scale,
    pairs,  # of chunks and recurrences
    tiles,  # M · the most chunks that there can be
    M: gl.constexpr,
    E: gl.constexpr,
    R: gl.constexpr,
    STEPS: gl.constexpr,
    K: gl.constexpr,
    BEFORE: gl.constexpr,
    PRODUCT: gl.constexpr,
):
    ERASE: gl.constexpr = erase is not None
    BLOCKS: gl.constexpr = K // 64
    NARROW: gl.constexpr = log_decay.dtype.element_ty == gl.bfloat16
    # a program brings the tiles of the next step while it computes, unless its memory would then fill a multiprocessor
    STAGES: gl.constexpr = 1 if BEFORE else 2
    queries_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], SHARED)
    keys_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], SHARED)
    erase_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES if ERASE else 1, 64, 64], SHARED)
    decays_s = gl.allocate_shared_memory(gl.bfloat16 if NARROW else gl.float32, [STAGES, 64, 64], LINES)
    exponents_s = gl.allocate_shared_memory(gl.int16, [2 if BEFORE else 1, 64, 64], SHARED)
    # separately, to avoid barriers between stores
    one = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    other = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    ends_s = gl.allocate_shared_memory(gl.float32, [8, 64], LINES)
    middles = allocate_middles(64)
    zeros = gl.zeros([64, 64], gl.float32, PAIRS)
    P, L = zeros, zeros
    count = gl.cdiv(pairs - gl.program_id(0), gl.num_programs(0)) * BLOCKS
    if STAGES == 2:
        first = queries_s.index(0), keys_s.index(0), erase_s.index(0), decays_s.index(0)
        bring(q, k, erase, log_decay, *first, gl.program_id(0), 0, chunks, M, E, R, STEPS, K)
        async_copy.commit_group()
    for step in range(count):
        place = gl.program_id(0) + step // BLOCKS * gl.num_programs(0)
        tile, m, block = place.to(gl.int64), place % M, step % BLOCKS
        token = gl.load(chunks + place // M * 2)
        stop = token + gl.load(chunks + place // M * 2 + 1)
        column = m * K + block * 64
        i = step % STAGES
        q_s, k_s, a_s = queries_s.index(i), keys_s.index(i), erase_s.index(i if ERASE else 0)
        if STAGES == 1:
            barrier()
            bring(q, k, erase, log_decay, q_s, k_s, a_s, decays_s.index(0), place, block, chunks, M, E, R, STEPS, K)
            async_copy.commit_group()
        if beta is not None:
            write = strength(beta, token, stop, m, M, OCTETS)
        async_copy.wait_group(0)
        barrier()
        if STAGES == 2:
            if step + 1 < count:
                i = (step + 1) % 2
                following = queries_s.index(i), keys_s.index(i), erase_s.index(i if ERASE else 0), decays_s.index(i)
                next_place = gl.program_id(0) + (step + 1) // BLOCKS * gl.num_programs(0)
                bring(q, k, erase, log_decay, *following, next_place, (step + 1) % BLOCKS, chunks, M, E, R, STEPS, K)
            async_copy.commit_group()
        g = in_log2(decays_s.index(step % STAGES).load(OCTETS))
        b, last, steep = sums_of_chunk(ends_s, middles, g)
        gl.store(total + (tile * K + block * 64 + gl.arange(0, 64, OF_CHANNELS)), exp2(last))
        n, rest = whole_and_rest(b)
        factor = exp2(rest)
        read = (q_s.load(OCTETS).to(gl.float32) * (factor * scale)).to(gl.bfloat16)
        q_s.store(read)
        store_rows(read_q, token, column, stop, M * K, times(read, exponent_after(n, at_start(OCTETS))), STEPS)
        Kk = k_s.load(OCTETS).to(gl.float32)
        store_rows(keep, token, column, stop, M * K, Kk * exp2(gl.expand_dims(last, 0) - b))
        A = as_read(k_s, a_s, ERASE, PRODUCT, OCTETS)
        k_s.store((Kk * exp2(-rest)).to(gl.bfloat16))
        exponents_s.index(0).store(n)
        if BEFORE:
            n, rest = whole_and_rest(b - g)
            factor = exp2(rest)
            exponents_s.index(1).store(n)
        if beta is not None:
            A = A * write
        erased = (A * factor).to(gl.bfloat16)
        a_s.store(erased)
        store_rows(read_a, token, column, stop, M * K, times(erased, exponent_after(n, at_start(OCTETS))))
        fence_async_shared()
        barrier()
        n = exponents_s.index(0).load(PAIRS)
        before = exponents_s.index(1).load(PAIRS) if BEFORE else n
        inside = q_s.load(PAIRS), k_s.load(PAIRS), a_s.load(PAIRS), n, before
        of_q, of_a = zeros, zeros
        for level in range(2 + steep):
            middle = middle_across(n, middles, level)
            of_q, of_a = products_of_level(inside, middle, one, other, of_q, of_a, level, BEFORE)
        if steep == 1:
            for level in range(3, 6):
                middle = middle_inside(n, level)
                of_q, of_a = products_of_level(inside, middle, one, other, of_q, of_a, level, BEFORE)
            itself = warpgroup_mma(q_s, k_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
            of_q = gl.where(apart() == 0, warpgroup_mma_wait(0, deps=[itself]), of_q)
        else:
            middle = middle_across(n, middles, 2)
            of_q, of_a = products_nearby(inside, middle, one, other, k_s, of_q, of_a, BEFORE)
        P, L = gl.where(block == 0, 0.0, P) + of_q, gl.where(block == 0, 0.0, L) + of_a
        if block == BLOCKS - 1:
            gl.store(at_tile(products, tile * 64, 0, 64, PAIRS, 64, 64), gl.where(distance() > 0, L, 0.0))
            at = at_tile(products, (tiles + tile) * 64, 0, 64, PAIRS, 64, 64)
            gl.store(at, gl.where(distance() >= 0, P, 0.0))


@gluon.jit
def gradients_of_level(inside, middles, room, dQ, dA, dK, level, ACROSS: gl.constexpr, BEFORE: gl.constexpr):
    """Add what pairs that a level separates contribute to the gradients of queries, erase keys and keys."""
    q_s, k_s, a_s, exponents_s = inside  # loaded for each use: registers are short
    n = exponents_s.index(0).load(PAIRS)
    middle = middle_across(n, middles, level) if ACROSS else middle_inside(n, level)
    of_q_s, of_a_s, pairs_q, pairs_a, kept_q, kept_a = room
    zeros, none = gl.zeros([64, 64], gl.float32, PAIRS), gl.zeros([64, 64], gl.bfloat16, PAIRS)
    written = k_s.load(PAIRS)
    tile, e = around_middle(q_s.load(PAIRS), written, n, middle, level)
    of_q_s.store(tile)
    first, e_a = first_halves(level, PAIRS), e
    if BEFORE:
        n = gl.where(first == 0, exponents_s.index(1).load(PAIRS), n)
        e_a = exponent_either(n, mark_of(middle, first), first)
    of_a_s.store(times(either(a_s.load(PAIRS), written, first), e_a))
    others = gl.where(apart() >> (5 - level) == 1, 0, -1).to(gl.int16)
    kept_q.store(either(pairs_q.load(PAIRS), none, others))
    kept_a.store(either(pairs_a.load(PAIRS), none, others))
    fence_async_shared()
    barrier()
    to_q = warpgroup_mma(kept_q, of_q_s, zeros, use_acc=False, is_async=True)
    to_a = warpgroup_mma(kept_a, of_a_s, zeros, use_acc=False, is_async=True)
    to_q, to_a = warpgroup_mma_wait(0, deps=[to_q, to_a])
    barrier()
    to_q *= power(e)
    to_a *= power(e_a)
    second = gl.where(first == 0, 1.0, 0.0)
    return dQ + to_q * second, dA + to_a * second, dK + (to_q + to_a) * (1.0 - second)


@gluon.jit
def gradients_nearby(inside, middles, room, later_s, dQ, dA, dK, BEFORE: gl.constexpr):
    """Add what pairs in blocks of 16 tokens contribute, for one reference point in each block."""
    q_s, k_s, a_s, exponents_s = inside
    n = exponents_s.index(0).load(PAIRS)
    middle = middle_across(n, middles, 2)
    of_q_s, of_a_s, pairs_q, pairs_a, kept_q, kept_a = room
    zeros, none = gl.zeros([64, 64], gl.float32, PAIRS), gl.zeros([64, 64], gl.bfloat16, PAIRS)
    read, written, after, until = near_middle(q_s.load(PAIRS), k_s.load(PAIRS), n, middle)
    of_q_s.store(read)
    later_s.store(written)
    after_a = after
    if BEFORE:
        after_a = exponent_after(exponents_s.index(1).load(PAIRS), mark_of(middle, gl.zeros([64, 64], gl.int16, PAIRS)))
    of_a_s.store(times(a_s.load(PAIRS), after_a))
    others = gl.where((apart() < 16) & (distance() > 0), 0, -1).to(gl.int16)
    kept_q.store(either(pairs_q.load(PAIRS), none, others))
    kept_a.store(either(pairs_a.load(PAIRS), none, others))
    fence_async_shared()
    barrier()
    to_q = warpgroup_mma(kept_q, later_s, zeros, use_acc=False, is_async=True)
    to_a = warpgroup_mma(kept_a, later_s, zeros, use_acc=False, is_async=True)
    to_k = warpgroup_mma(kept_q.permute((1, 0)), of_q_s, zeros, use_acc=False, is_async=True)
    to_k = warpgroup_mma(kept_a.permute((1, 0)), of_a_s, to_k, is_async=True)
    to_q, to_a, to_k = warpgroup_mma_wait(0, deps=[to_q, to_a, to_k])
    barrier()
    return dQ + to_q * power(after), dA + to_a * power(after_a), dK + to_k * power(until)


@gluon.jit
def five_tiles():
    """Allocate five tiles, separately to avoid barriers between stores."""
    a = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    b = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    c = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    d = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    e = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    return a, b, c, d, e


@gluon.jit
def gradients(
    q,
    k,
    erase,
    beta,
    log_decay,
    do,
    u,
    dr,
    states,  # [chunks,M,V,K]: before each chunk
    dstates,  # … and the gradients after it
    dP,  # [chunks,M,64,64], like dL: below the diagonal
    dL,
    diagonal,
    dq,  # [tokens,M,K], like dg
    dk,  # [rows,M,K], like derase
    derase,  # if there are erase keys
    dbeta,  # [blocks of keys,rows,M] if there is β: the part of the keys
    dg,
    chunks,
    scale,
    total_rows,
    M: gl.constexpr,
    E: gl.constexpr,
    R: gl.constexpr,
    STEPS: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    BEFORE: gl.constexpr,
    PRODUCT: gl.constexpr,
):
    BLOCKS: gl.constexpr = K // 64
    block, place = gl.program_id(0) % BLOCKS, gl.program_id(0) // BLOCKS
    chunk, m = place // M, place % M
    tile = chunk.to(gl.int64) * M + m
    token = gl.load(chunks + chunk * 2)
    stop = token + gl.load(chunks + chunk * 2 + 1)
    HEADS: gl.constexpr = M // R
    VALUES: gl.constexpr = M // E
    head = ((m // (E * R)) * E + m % E) * K + block * 64
    column = m * K + block * 64
    ERASE: gl.constexpr = erase is not None
    PARTS: gl.constexpr = V // 64
    FREE: gl.constexpr = PARTS % 2  # the set of tiles that the last part leaves alone
    sets = five_tiles(), five_tiles()
    q_s, k_s, pairs_q, pairs_a, a_s = sets[FREE]
    erased_s, of_q_s, of_a_s, later_s, kept_q = sets[1 - FREE]
    a_s = a_s if ERASE else k_s
    exponents_s = gl.allocate_shared_memory(gl.int16, [2 if BEFORE else 1, 64, 64], SHARED)
    rests_s = gl.allocate_shared_memory(gl.float16, [2 if BEFORE else 1, 64, 64], SHARED)
    kept_a = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    ends_s = gl.allocate_shared_memory(gl.float32, [8, 64], LINES)
    total_s = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    middles = allocate_middles(64)
    zeros = gl.zeros([64, 64], gl.float32, PAIRS)
    from_q, from_a, dK, through = zeros, zeros, zeros, zeros
    # what is read from memory only once is loaded early
    r = gl.arange(0, 64, OF_ROWS)
    itself = gl.expand_dims(gl.load(diagonal + tile * 64 + r), 1)
    g = load_log_decays(log_decay, token, column, stop, M * K, STEPS)
    if beta is not None:
        write, write_of_rows = strength(beta, token, stop, m, M, OCTETS), strength(beta, token, stop, m, M, PAIRS)
    for part in gl.static_range(PARTS + 1):
        if part < PARTS:
            S, dS, dO, dR, U = sets[part % 2]
            copy_square(S, states, tile * V + part * 64, block * 64, K)
            copy_square(dS, dstates, tile * V + part * 64, block * 64, K)
            copy_rows(dO, do, token, (m // E) * V + part * 64, stop, VALUES * V, STEPS)
            copy_rows(dR, dr, token, m * V + part * 64, stop, M * V)
            copy_rows(U, u, token, m * V + part * 64, stop, M * V)
        else:
            copy_rows(q_s, q, token, head, stop, HEADS * K, STEPS)
            copy_rows(k_s, k, token, head, stop, HEADS * K)
            copy_square(pairs_q, dP, tile * 64, 0, 64)
            copy_square(pairs_a, dL, tile * 64, 0, 64)
            if ERASE:
                copy_rows(a_s, erase, token, column, stop, M * K)
        async_copy.commit_group()
        if part > 0:
            S, dS, dO, dR, U = sets[(part - 1) % 2]
            async_copy.wait_group(1)
            fence_async_shared()
            barrier()
            from_q = warpgroup_mma(dO, S, from_q, is_async=True)
            from_a = warpgroup_mma(dR, S, from_a, is_async=True)
            dK = warpgroup_mma(U, dS, dK, is_async=True)
            through = through + S.load(PAIRS).to(gl.float32) * dS.load(PAIRS).to(gl.float32)
            from_q, from_a, dK = warpgroup_mma_wait(0, deps=[from_q, from_a, dK])
            barrier()
    async_copy.wait_group(0)
    through = gl.sum(through, 0)
    b, last, steep = sums_of_chunk(ends_s, middles, g)
    total_s.store(last)
    n, rest = whole_and_rest(b)
    factor = exp2(rest)
    exponents_s.index(0).store(n)
    rests_s.index(0).store(factor.to(gl.float16))
    A = as_read(k_s, a_s, ERASE, PRODUCT, OCTETS)
    q_s.store((q_s.load(OCTETS).to(gl.float32) * factor).to(gl.bfloat16))
    k_s.store((k_s.load(OCTETS).to(gl.float32) * exp2(-rest)).to(gl.bfloat16))
    if BEFORE:
        n, rest = whole_and_rest(b - g)
        factor = exp2(rest)
        exponents_s.index(1).store(n)
        rests_s.index(1).store(factor.to(gl.float16))
    if beta is not None:
        A = A * write
    erased_s.store((A * factor).to(gl.bfloat16))
    P = pairs_q.load(PAIRS) + pairs_q.permute((1, 0)).load(PAIRS)
    L = pairs_a.load(PAIRS) + pairs_a.permute((1, 0)).load(PAIRS)
    barrier()
    pairs_q.store(P)
    pairs_a.store(L)
    n = exponents_s.index(0).load(PAIRS)
    before = exponents_s.index(1).load(PAIRS) if BEFORE else n
    # The gradients are those of queries, keys and erase keys times the parts of their decays that are no powers of two.
    dQ = from_q * (power(exponent_after(n, at_start(PAIRS))) * scale)
    dA = from_a * -power(exponent_after(before, at_start(PAIRS)))
    leaving = dK * exp2(gl.expand_dims(total_s.load(OF_COLUMNS), 0) - n.to(gl.float32))
    through = through * exp2(total_s.load(OF_COLUMNS))
    room = of_q_s, of_a_s, pairs_q, pairs_a, kept_q, kept_a
    inside = q_s, k_s, erased_s, exponents_s
    dK = zeros
    for level in range(2 + steep):
        dQ, dA, dK = gradients_of_level(inside, middles, room, dQ, dA, dK, level, True, BEFORE)
    if steep == 1:
        for level in range(3, 6):
            dQ, dA, dK = gradients_of_level(inside, middles, room, dQ, dA, dK, level, False, BEFORE)
    else:
        dQ, dA, dK = gradients_nearby(inside, middles, room, later_s, dQ, dA, dK, BEFORE)
    # The gradient of a decay is the sum of `reach` over its token and later ones, of what leaves over earlier ones, and
    # `through`. In `reach` the two parts of a pair cancel exactly for later decays, since both take the factors as the
    # products take them, rounded to bf16. A token paired with itself does not decay.
    read, written = q_s.load(PAIRS).to(gl.float32), k_s.load(PAIRS).to(gl.float32)
    by_erasing = erased_s.load(PAIRS).to(gl.float32) * dA
    reach = read * dQ + by_erasing - written * dK
    rest = rests_s.index(0).load(PAIRS).to(gl.float32)
    store_rows(dq, token, column, stop, M * K, (dQ + itself * written) * rest, STEPS)
    dK = (dK + leaving + itself * read) * reciprocal(rest)
    dA = dA * rests_s.index(1 if BEFORE else 0).load(PAIRS).to(gl.float32)
    Kk = written * rest
    if dg is not None:
        later_s.store((written * leaving).to(gl.bfloat16))
        kept_q.store((columns() >= rows()).to(gl.bfloat16))
        kept_a.store((columns() < rows()).to(gl.bfloat16))
        high = truncated(reach)
        of_q_s.store(high.to(gl.bfloat16))
        of_a_s.store((reach - high).to(gl.bfloat16))
        fence_async_shared()
        barrier()
        sums = warpgroup_mma(kept_q, of_a_s, zeros, use_acc=False, is_async=True)
        sums = warpgroup_mma(kept_q, of_q_s, sums, is_async=True)
        sums = warpgroup_mma(kept_a, later_s, sums, is_async=True)
        sums = warpgroup_mma_wait(0, deps=[sums]) + gl.expand_dims(through, 0)
        if BEFORE:
            sums = sums - by_erasing
        valid = first_steps(gl.expand_dims(r, 1), token, stop, STEPS)
        gl.store(at_tile(dg, token, column, M * K, PAIRS, 64, 64, STEPS), sums, mask=valid)
        if steep == 1:  # nothing passes a reset
            at = at_tile(log_decay, token, column, M * K, PAIRS, 64, 64, STEPS)
            resets = valid & (in_log2(gl.load(at, mask=valid, other=0.0)) <= LEAST)
            gl.store(at_tile(dg, token, column, M * K, PAIRS, 64, 64, STEPS), zeros, mask=resets)
    erased_by = a_s.load(PAIRS).to(gl.float32) if ERASE else Kk
    if beta is not None:
        at = dbeta + (block.to(gl.int64) * total_rows * M + token.to(gl.int64) * M + m + r * M)
        gl.store(at, gl.sum(erased_by * dA, 1), mask=r < stop - token)
        dA = dA * write_of_rows
    if PRODUCT:
        dK = dK + dA * erased_by
        dA = dA * Kk
    if ERASE:
        store_rows(derase, token, column, stop, M * K, dA)
    else:
        dK = dK + dA
    store_rows(dk, token, column, stop, M * K, dK)
