"""Features of an expanded head in one pass, and their gradients in another, on Hopper: product, convolution,
activation and norm, without the product in memory.

A program has the matrix of one subhead in shared memory and walks over tiles of tokens, each of which begins three
tokens (the reach of the convolution) before its first result, so that tiles do not depend on one another. The product
is computed with tokens as its columns, in an order in which each thread holds a quarter of the tile's tokens of a
channel, one after the other: the convolution then stays within a thread's registers, except for three tokens that come
from the neighbouring thread.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"
# ruff: noqa: RUF005

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ...gpu.gluon_tiles import COPY, SHARED, STATE, async_load, at_tile, barrier, opaque

REACH = gl.constexpr(3)  # tokens before the current one that the convolution sees
LANES = gl.constexpr(4)  # threads that share a channel of a tile; each has a run of its tokens
SHORT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 64, 16]))  # as `STATE`, for 64 columns


@gluon.jit
def place(n, TILE: gl.constexpr):
    """Token of a tile that is column n of a product: thread a of four has columns 8j + 2a and 8j + 2a + 1."""
    return ((n >> 1) & 3) * (TILE // LANES) + (n >> 3) * 2 + (n & 1)


@gluon.jit
def tokens_of(TILE: gl.constexpr):
    """The tokens of the rows of a tile in shared memory."""
    return gl.expand_dims(place(opaque(gl.arange(0, TILE, gl.SliceLayout(1, COPY))), TILE), 1)


@gluon.jit
def copy_tile(shared, x, first, column, T, stride: gl.constexpr, TILE: gl.constexpr):
    """Start to copy a tile that begins with token `first`; zeros outside of the sequence."""
    token = first + tokens_of(TILE)
    c = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, COPY)), 0)
    at = x + (token.to(gl.int64) * stride + (column + c))
    async_load(shared, at, mask=(token >= 0) & (token < T))


@gluon.jit
def store_tile(y, tile, first, column, T, stride: gl.constexpr, TILE: gl.constexpr, COUNT: gl.constexpr):
    """Store the results of a tile, COUNT tokens from the fourth on."""
    within = tokens_of(TILE)
    token = first + within
    c = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, COPY)), 0)
    wanted = (within >= REACH) & (within < REACH + COUNT) & (token < T)
    gl.store(y + (token.to(gl.int64) * stride + (column + c)), tile, mask=wanted)


@gluon.jit
def in_runs(tile):
    """Channels × columns as channels × threads × their tokens, without moving anything."""
    RUN: gl.constexpr = tile.shape[1] // LANES
    return gl.reshape(gl.permute(gl.reshape(tile, [128, RUN // 2, LANES, 2]), (0, 2, 1, 3)), [128, LANES, RUN])


@gluon.jit
def in_columns(runs):
    """The inverse of `in_runs`."""
    RUN: gl.constexpr = runs.shape[2]
    return gl.reshape(gl.permute(gl.reshape(runs, [128, LANES, RUN // 2, 2]), (0, 2, 1, 3)), [128, RUN * LANES])


@gluon.jit
def apart(runs):
    """A tuple of the tokens of a run, each channels × threads."""
    RUN: gl.constexpr = runs.shape[2]
    parts = (runs,)
    for d in gl.static_range(4 if RUN == 16 else 5):
        halves = ()
        for i in gl.static_range(1 << d):
            both = gl.reshape(parts[i], [128, LANES, 2, RUN >> (d + 1)])
            early, late = gl.split(gl.permute(both, (0, 1, 3, 2)))
            halves = halves + (early, late)
        parts = halves
    tokens = ()
    for i in gl.static_range(RUN):
        tokens = tokens + (gl.reshape(parts[i], [128, LANES]),)
    return tokens


@gluon.jit
def joined(tokens):
    """The inverse of `apart`."""
    RUN: gl.constexpr = len(tokens)
    parts = ()
    for i in gl.static_range(RUN):
        parts = parts + (gl.reshape(tokens[i], [128, LANES, 1]),)
    for d in gl.static_range(4 if RUN == 16 else 5):
        merged = ()
        for i in gl.static_range(RUN >> (d + 1)):
            both = gl.permute(gl.join(parts[2 * i], parts[2 * i + 1]), (0, 1, 3, 2))
            merged = merged + (gl.reshape(both, [128, LANES, 2 << d]),)
        parts = merged
    return parts[0]


@gluon.jit
def neighbour(x, STEP: gl.constexpr):
    """The value held by the lane `STEP` positions away."""
    LAYOUT: gl.constexpr = x.type.layout
    a = gl.expand_dims((gl.arange(0, LANES, gl.SliceLayout(0, LAYOUT)) + STEP) & (LANES - 1), 0)
    at = a + 0 * gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(1, LAYOUT)), 1)
    return gl.gather(x, at, axis=1)


@gluon.jit
def with_past(tokens):
    """The tokens of a run, behind the three before it."""
    window = ()
    for i in gl.static_range(REACH):
        window = window + (neighbour(tokens[len(tokens) - REACH + i], -1),)
    return window + tokens


@gluon.jit
def with_future(tokens):
    """The tokens of a run, and the three after it."""
    window = tokens
    for i in gl.static_range(REACH):
        window = window + (neighbour(tokens[i], 1),)
    return window


@gluon.jit
def taps_of(taps, channel, SILU: gl.constexpr, LAYOUT: gl.constexpr):
    """The four taps of each channel; the last one applies to the current token. They are halved for `SILU`."""
    at = taps + gl.expand_dims((channel + gl.arange(0, 128, gl.SliceLayout(1, LAYOUT))) * (REACH + 1), 1)
    weights = ()
    for j in gl.static_range(REACH + 1):
        weights = weights + (gl.load(at + j).to(gl.float32) * (0.5 if SILU else 1.0),)
    return weights


@gluon.jit
def convolved(window, taps, REVERSE: gl.constexpr):
    """Σ_j taps_j · window_{t+j} for each token of a run, with the taps in reverse for gradients."""
    sums = ()
    for i in gl.static_range(len(window) - REACH):
        z = taps[REACH if REVERSE else 0] * window[i]
        for j in gl.static_range(1, REACH + 1):
            z += taps[REACH - j if REVERSE else j] * window[i + j]
        sums = sums + (z,)
    return sums


@gluon.jit
def tanh(x):
    """tanh(x) with an error of up to 2⁻¹¹.

    SiLU(2 x) is x + x tanh(x), to an eighth of what bf16 rounds off x. As x / (1 + e⁻ˣ), it takes half of the time.
    """
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def copy_matrix(shared, product, subhead, SUBHEADS: gl.constexpr):
    """Start to copy the matrix [128, 128] of a subhead out of [heads, 128, SUBHEADS · 128]."""
    row, column = subhead // SUBHEADS * 128, subhead % SUBHEADS * 128
    async_load(shared, at_tile(product, row, column, SUBHEADS * 128, COPY, 128, 128))


@gluon.jit
def multiplied(matrix, tile, TILE: gl.constexpr):
    """The product, channels × columns."""
    zeros = gl.zeros([128, TILE], gl.float32, STATE if TILE == 128 else SHORT)
    z = warpgroup_mma(matrix.permute((1, 0)), tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=[z])


@gluon.jit(do_not_specialize=["T", "tiles"])
def forward(
    x,  # [B,T,heads,128]
    product,  # [heads,128,SUBHEADS·128]
    taps,  # [C,1,4]
    y,  # [B,T,C]
    T,
    tiles,  # of a program
    x_batch,
    x_token: gl.constexpr,
    C: gl.constexpr,
    SUBHEADS: gl.constexpr,
    SILU: gl.constexpr,
    L2: gl.constexpr,
    EPS: gl.constexpr,
    TILE: gl.constexpr,
):
    COLUMNS: gl.constexpr = STATE if TILE == 128 else SHORT
    subhead, run = gl.program_id(0) % (C // 128), gl.program_id(0) // (C // 128)
    ALONE: gl.constexpr = TILE - REACH
    count = gl.cdiv(T, ALONE)
    runs = gl.cdiv(count, tiles)
    row, first = run // runs, run % runs * tiles
    last = gl.minimum(first + tiles, count)
    head = subhead // SUBHEADS
    x += row.to(gl.int64) * x_batch
    y += row.to(gl.int64) * T * C

    matrix_s = gl.allocate_shared_memory(gl.bfloat16, [128, 128], SHARED)
    tiles_s = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, 128], SHARED)
    copy_matrix(matrix_s, product, subhead, SUBHEADS)
    copy_tile(tiles_s.index(0), x, first * ALONE - REACH, head * 128, T, x_token, TILE)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    barrier()
    none = apart(in_runs(gl.zeros([128, TILE], gl.float32, COLUMNS)))
    LAYOUT: gl.constexpr = none[0].type.layout
    weights = taps_of(taps, subhead * 128, SILU, LAYOUT)
    for i in range(first, last):
        start = i * ALONE - REACH
        tile = tiles_s.index((i - first) % 2)
        z = multiplied(matrix_s, tile, TILE)
        barrier()
        # the other buffer's results are read by now, and this tile's inputs
        end = gl.where(i + 1 < last, T, 0)
        copy_tile(tiles_s.index((i - first + 1) % 2), x, start + ALONE, head * 128, end, x_token, TILE)
        async_copy.commit_group()
        a = joined(convolved(with_past(apart(in_runs(z))), weights, False))
        if SILU:
            a += a * tanh(a)
        tile.permute((1, 0)).store(gl.convert_layout(in_columns(a).to(gl.bfloat16), COLUMNS))
        # in front of the stores to memory, for which the fence would wait
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        block = tile.load(COPY)
        if L2:  # a thread has 8 channels of a token here, rather than 2
            a = block.to(gl.float32)
            block = (a * gl.expand_dims(gl.rsqrt(gl.sum(a * a, 1) + EPS), 1)).to(gl.bfloat16)
        store_tile(y, block, start, subhead * 128, T, C, TILE, ALONE)


@gluon.jit(do_not_specialize=["T", "tiles"])
def backward(
    x,  # [B,T,heads,128]
    product,  # [heads,128,SUBHEADS·128]
    taps,  # [C,1,4]
    dy,  # [B,T,C]
    dz,  # [B,T,C], the gradient of the product
    dtaps,  # [runs,4,C]: to be summed over the runs
    T,
    tiles,  # of a program
    x_batch,
    x_token: gl.constexpr,
    C: gl.constexpr,
    SUBHEADS: gl.constexpr,
    SILU: gl.constexpr,
    TILE: gl.constexpr,
):
    COLUMNS: gl.constexpr = STATE if TILE == 128 else SHORT
    RUN: gl.constexpr = TILE // LANES
    subhead, run = gl.program_id(0) % (C // 128), gl.program_id(0) // (C // 128)
    SHARING: gl.constexpr = TILE - 2 * REACH
    count = gl.cdiv(T, SHARING)
    runs = gl.cdiv(count, tiles)
    row, first = run // runs, run % runs * tiles
    last = gl.minimum(first + tiles, count)
    head = subhead // SUBHEADS
    x += row.to(gl.int64) * x_batch
    dy += row.to(gl.int64) * T * C
    dz += row.to(gl.int64) * T * C

    matrix_s = gl.allocate_shared_memory(gl.bfloat16, [128, 128], SHARED)
    tile_s = gl.allocate_shared_memory(gl.bfloat16, [TILE, 128], SHARED)
    grad_s = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, 128], SHARED)
    copy_matrix(matrix_s, product, subhead, SUBHEADS)
    copy_tile(tile_s, x, first * SHARING - REACH, head * 128, T, x_token, TILE)
    copy_tile(grad_s.index(0), dy, first * SHARING - REACH, subhead * 128, T, C, TILE)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    barrier()
    none = apart(in_runs(gl.zeros([128, TILE], gl.float32, COLUMNS)))
    LAYOUT: gl.constexpr = none[0].type.layout
    weights = taps_of(taps, subhead * 128, SILU, LAYOUT)
    a = gl.expand_dims(gl.arange(0, LANES, gl.SliceLayout(0, LAYOUT)), 0)
    totals = (none[0], none[0], none[0], none[0])
    for i in range(first, last):
        start = i * SHARING - REACH
        grads = grad_s.index((i - first) % 2)
        arrived = grads.permute((1, 0)).load(COLUMNS)
        z = multiplied(matrix_s, tile_s, TILE)
        barrier()
        end = gl.where(i + 1 < last, T, 0)
        copy_tile(tile_s, x, start + SHARING, head * 128, end, x_token, TILE)
        copy_tile(grad_s.index((i - first + 1) % 2), dy, start + SHARING, subhead * 128, end, C, TILE)
        async_copy.commit_group()
        window = with_past(apart(in_runs(z)))
        c = joined(convolved(window, weights, False))
        RUNS: gl.constexpr = c.type.layout
        g = gl.convert_layout(in_runs(arrived.to(gl.float32)), RUNS)
        if SILU:
            t = tanh(c)
            c += c * t
            g += g * (t + (c - c * t))  # twice the slope; the taps of the next convolution are halved
        own = ()
        late = apart(g)
        for m in gl.static_range(RUN):
            mine = late[m]
            if m < REACH:
                mine = gl.where(a > 0, mine, 0.0)
            if m >= RUN - REACH:
                mine = gl.where(a < LANES - 1, mine, 0.0)
            own = own + (mine,)
        t0, t1, t2, t3 = totals
        for m in gl.static_range(RUN):
            t0 = t0 + own[m] * window[m]
            t1 = t1 + own[m] * window[m + 1]
            t2 = t2 + own[m] * window[m + 2]
            t3 = t3 + own[m] * window[m + 3]
        totals = (t0, t1, t2, t3)
        out = joined(convolved(with_future(late), weights, True))
        grads.permute((1, 0)).store(gl.convert_layout(in_columns(out).to(gl.bfloat16), COLUMNS))
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        store_tile(dz, grads.load(COPY), start, subhead * 128, T, C, TILE, SHARING)
    at = dtaps + run.to(gl.int64) * (REACH + 1) * C + subhead * 128
    for j in gl.static_range(REACH + 1):
        total = gl.sum(totals[j], 1) * (0.5 if SILU else 1.0)
        gl.store(at + j * C + gl.arange(0, 128, gl.SliceLayout(1, LAYOUT)), total)
