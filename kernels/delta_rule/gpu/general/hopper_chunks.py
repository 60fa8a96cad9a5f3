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

from ....gpu.gluon_exponents import (
    SAFE,
    allocate_middles,
    apart,
    around_middle,
    either,
    exponent_after,
    exponent_either,
    first_halves,
    mark_of,
    middle_across,
    middle_inside,
    near_middle,
    plus,
    square,
    store_middles,
    times,
    whole_and_rest,
)
from ....gpu.gluon_halves import (
    LEAST,
    LOG2E,
    OCTETS,
    UNSCALED,
    add_twice,
    addresses,
    columns,
    copy_rows,
    copy_square,
    exp2,
    from_start,
    in_blocks,
    is_second,
    load_decays,
    load_log_decays,
    of_chunk,
    rows,
    separated,
    store_factors,
    store_parts,
    store_rows,
    to_end,
)
from ....gpu.gluon_tiles import FLAT, OF_COLUMNS, OF_ROWS, PAIRS, SHARED, barrier, distance

FACTORS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
LINES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
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
    tiles,  # chunks · M
    M: gl.constexpr,
    E: gl.constexpr,
    R: gl.constexpr,
    STEPS: gl.constexpr,
    K: gl.constexpr,
    BEFORE: gl.constexpr,
    PRODUCT: gl.constexpr,
):
    chunk, m = gl.program_id(0) // M, gl.program_id(0) % M
    tile = gl.program_id(0).to(gl.int64)
    token = gl.load(chunks + chunk * 2)
    stop = token + gl.load(chunks + chunk * 2 + 1)
    HEADS: gl.constexpr = M // R  # of q and k
    head = ((m // (E * R)) * E + m % E) * K
    ERASE: gl.constexpr = erase is not None
    OF_CHANNELS: gl.constexpr = gl.SliceLayout(0, OCTETS)
    q_s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    a_s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    exponents_s = gl.allocate_shared_memory(gl.int16, [2 if BEFORE else 1, 64, 64], SHARED)
    # separately, to avoid barriers between stores
    one = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    other = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    ends_s = gl.allocate_shared_memory(gl.float32, [8, 64], LINES)
    middles = allocate_middles(64)
    zeros = gl.zeros([64, 64], gl.float32, PAIRS)
    P, L = zeros, zeros
    for block in range(K // 64):
        column = m * K + block * 64
        barrier()
        copy_rows(q_s, q, token, head + block * 64, stop, HEADS * K, STEPS)
        copy_rows(k_s, k, token, head + block * 64, stop, HEADS * K)
        if ERASE:
            copy_rows(a_s, erase, token, column, stop, M * K)
        async_copy.commit_group()
        g = load_log_decays(log_decay, token, column, stop, M * K, STEPS)
        b = gl.associative_scan(g, 0, plus)
        ends_s.store(gl.sum(in_blocks(g, 8), 1))
        async_copy.wait_group(0)
        barrier()
        sums = ends_s.load(EIGHTS)
        store_middles(middles, gl.associative_scan(sums, 0, plus), OF_MIDDLES)
        last = gl.convert_layout(gl.sum(sums, 0), OF_CHANNELS)
        steep = (gl.min(gl.min(sums, 0), 0) < -SAFE).to(gl.int32)  # whether one reference in 16 tokens does not do
        gl.store(total + (tile * K + block * 64 + gl.arange(0, 64, OF_CHANNELS)), exp2(last))
        n, rest = whole_and_rest(b)
        factor = exp2(rest)
        start = gl.zeros([64, 64], gl.int16, OCTETS) + 127  # of the chunk, as a reference point
        read = (q_s.load(OCTETS).to(gl.float32) * (factor * scale)).to(gl.bfloat16)
        q_s.store(read)
        store_rows(read_q, token, column, stop, M * K, times(read, exponent_after(n, start)), STEPS)
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
            A = A * strength(beta, token, stop, m, M, OCTETS)
        erased = (A * factor).to(gl.bfloat16)
        a_s.store(erased)
        store_rows(read_a, token, column, stop, M * K, times(erased, exponent_after(n, start)))
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
        P, L = P + of_q, L + of_a
    gl.store(addresses(products, tile * 64, 0, 64, PAIRS), gl.where(distance() > 0, L, 0.0))
    gl.store(addresses(products, (tiles + tile) * 64, 0, 64, PAIRS), gl.where(distance() >= 0, P, 0.0))


@gluon.jit
def in_pairs(room, x):
    """x in the layout `PAIRS`."""
    barrier()
    room.store(x)
    barrier()
    return room.load(PAIRS)


@gluon.jit
def with_pairs(
    pairs_s, q_s, k_s, a_s, factors_s, decays_s, write, dX, dK, reach, by_erasing,
    ERASING: gl.constexpr, ERASE: gl.constexpr, BEFORE: gl.constexpr, PRODUCT: gl.constexpr,
):  # fmt: skip
    """Add what pairs of tokens contribute to the gradients of queries or erase keys, of keys and of decays.

    In `reach` the two parts of a pair cancel exactly for later decays, since both take the factors as the products take
    them, rounded to bf16.
    """
    for level in range(6):
        second = is_second(level)
        factor = decays_s.index(level).load(PAIRS).to(gl.float32)
        if ERASING:
            X = as_read(k_s, a_s, ERASE, PRODUCT, PAIRS) * write
            if BEFORE:
                factor = gl.where(second, decays_s.index(6 + level).load(PAIRS).to(gl.float32), factor)
        else:
            X = q_s.load(PAIRS).to(gl.float32)
        pairs = pairs_s.load(PAIRS)
        X = gl.where(second, X, k_s.load(PAIRS).to(gl.float32))
        barrier()
        factors_s.index(1).store((X * factor).to(gl.bfloat16))
        factors_s.index(0).store(gl.where(separated(level), pairs, gl.zeros([64, 64], gl.bfloat16, PAIRS)))
        fence_async_shared()
        barrier()
        # rows of second halves from the product with the pairs, those of first halves from that with their transpose
        other = gl.zeros([64, 64], gl.float32, PAIRS)
        other = warpgroup_mma(factors_s.index(0), factors_s.index(1), other, use_acc=False, is_async=True)
        other = warpgroup_mma(factors_s.index(0).permute((1, 0)), factors_s.index(1), other, is_async=True)
        other = warpgroup_mma_wait(0, deps=[other])
        of_second = gl.where(second, UNSCALED, 0.0)
        past = factors_s.index(1).load(PAIRS).to(gl.float32) * other
        reach = reach + past * gl.where(second, UNSCALED, -UNSCALED)
        if ERASING and BEFORE:
            by_erasing = by_erasing + past * of_second
        other = other * factor
        dX = dX + other * of_second
        dK = dK + other * gl.where(second, 0.0, UNSCALED)
    return dX, dK, reach, by_erasing


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
    q_s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    a_s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED) if ERASE else k_s
    pairs_s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    kept_s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    totals_s = gl.allocate_shared_memory(gl.float32, [512], FLAT)
    copy_rows(q_s, q, token, head, stop, HEADS * K, STEPS)
    copy_rows(k_s, k, token, head, stop, HEADS * K)
    if ERASE:
        copy_rows(a_s, erase, token, column, stop, M * K)
    copy_square(pairs_s, dP, tile * 64, 0, 64)
    zeros = gl.zeros([64, 64], gl.float32, PAIRS)
    from_q, from_a, dK = zeros, zeros, zeros
    through = gl.zeros([64], gl.float32, OF_COLUMNS)
    values_s = gl.allocate_shared_memory(gl.bfloat16, [5, 64, 64], SHARED)
    for values in range(0, V, 64):
        barrier()
        copy_square(values_s.index(0), states, tile * V + values, block * 64, K)
        copy_square(values_s.index(1), dstates, tile * V + values, block * 64, K)
        copy_rows(values_s.index(2), do, token, (m // E) * V + values, stop, VALUES * V, STEPS)
        copy_rows(values_s.index(3), dr, token, m * V + values, stop, M * V)
        copy_rows(values_s.index(4), u, token, m * V + values, stop, M * V)
        async_copy.commit_group()
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        from_q = warpgroup_mma(values_s.index(2), values_s.index(0), from_q, is_async=True)
        from_a = warpgroup_mma(values_s.index(3), values_s.index(0), from_a, is_async=True)
        dK = warpgroup_mma(values_s.index(4), values_s.index(1), dK, is_async=True)
        S, dS = values_s.index(0).load(PAIRS).to(gl.float32), values_s.index(1).load(PAIRS).to(gl.float32)
        through = through + gl.sum(S * dS, 0)
        from_q, from_a, dK = warpgroup_mma_wait(0, deps=[from_q, from_a, dK])

    decays_s = gl.allocate_shared_memory(gl.float16, [12 if BEFORE else 6, 64, 64], SHARED)
    decay = load_decays(log_decay, token, column, stop, M * K, STEPS)
    until, after, past = store_factors(decays_s, totals_s, decay, BEFORE)
    room = gl.allocate_shared_memory(gl.float32, [64, 64], FACTORS)
    write = strength(beta, token, stop, m, M, PAIRS) if beta is not None else 1.0
    entering = in_pairs(room, from_start(until, totals_s))
    dQ = from_q * (entering * scale)
    if BEFORE:
        entering = in_pairs(room, from_start(past, totals_s))
    dA = from_a * -entering
    dK = dK * in_pairs(room, to_end(after, totals_s))
    # the gradient of a decay is the sum of `reach` over its token and later ones, of `kept` over earlier ones, and
    # `through`: sums without terms that cancel
    kept_s.store((k_s.load(PAIRS).to(gl.float32) * dK).to(gl.bfloat16))
    through = through * of_chunk(totals_s, OF_COLUMNS)
    by_erasing = as_read(k_s, a_s, ERASE, PRODUCT, PAIRS) * write * dA
    reach = q_s.load(PAIRS).to(gl.float32) * dQ + by_erasing
    factors_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], SHARED)
    tiles = q_s, k_s, a_s, factors_s, decays_s, write
    dQ, dK, reach, _ = with_pairs(pairs_s, *tiles, dQ, dK, reach, zeros, False, ERASE, BEFORE, PRODUCT)
    barrier()
    copy_square(pairs_s, dL, tile * 64, 0, 64)
    async_copy.commit_group()
    r = gl.arange(0, 64, OF_ROWS)
    itself = gl.expand_dims(gl.load(diagonal + tile * 64 + r), 1)
    store_rows(dq, token, column, stop, M * K, dQ + itself * k_s.load(PAIRS).to(gl.float32), STEPS)
    dK = dK + itself * q_s.load(PAIRS).to(gl.float32)
    async_copy.wait_group(0)
    barrier()
    dA, dK, reach, by_erasing = with_pairs(pairs_s, *tiles, dA, dK, reach, by_erasing, True, ERASE, BEFORE, PRODUCT)
    if dg is not None:
        barrier()
        ones_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], SHARED)
        ones_s.index(0).store((columns() >= rows()).to(gl.bfloat16))
        ones_s.index(1).store((columns() < rows()).to(gl.bfloat16))
        store_parts(factors_s, reach)
        fence_async_shared()
        barrier()
        sums = add_twice(ones_s.index(0), factors_s, zeros)
        sums = warpgroup_mma(ones_s.index(1), kept_s, sums, is_async=True)
        sums = warpgroup_mma_wait(0, deps=[sums]) + gl.expand_dims(through, 0)
        if BEFORE:
            sums = sums - by_erasing
        valid = gl.expand_dims(r, 1) < stop - token
        if STEPS > 1:
            valid = valid & ((token + gl.expand_dims(r, 1)) % STEPS == 0)
        at = addresses(log_decay, token, column, M * K, PAIRS, STEPS)
        g = gl.load(at, mask=valid, other=0.0).to(gl.float32)
        sums = gl.where(g * LOG2E <= LEAST, 0.0, sums)  # nothing passes a reset
        gl.store(addresses(dg, token, column, M * K, PAIRS, STEPS), sums, mask=valid)
    erased_by = a_s.load(PAIRS).to(gl.float32)
    if beta is not None:
        at = dbeta + (block.to(gl.int64) * total_rows * M + token.to(gl.int64) * M + m + r * M)
        gl.store(at, gl.sum(erased_by * dA, 1), mask=r < stop - token)
        dA = dA * write
    if PRODUCT:
        dK = dK + dA * erased_by
        dA = dA * k_s.load(PAIRS).to(gl.float32)
    if ERASE:
        store_rows(derase, token, column, stop, M * K, dA)
    else:
        dK = dK + dA
    store_rows(dk, token, column, stop, M * K, dK)
