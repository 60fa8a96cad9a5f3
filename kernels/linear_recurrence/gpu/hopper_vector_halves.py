"""Scores of steep chunks by halves, and their gradients, on Hopper (`hopper_vector_decay.py`).

Exponents are numbers of 16 bits, two in a register: few integer instructions change those of two factors.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ...gpu.gluon_halves import (
    apart,
    around_middle,
    either,
    exponent_after,
    exponent_before,
    first_halves,
    middle_across,
    middle_inside,
    near_middle,
    power,
    square,
    times,
)
from ...gpu.gluon_tiles import PAIRS, barrier, distance
from .hopper_vector_sums import at_end, at_start


@gluon.jit
def of_half(queries, keys, n, middles, LEVEL: gl.constexpr):
    """Return the factors of a level's product."""
    middle = middle_inside(n, LEVEL) if LEVEL > 2 else middle_across(n, middles, LEVEL)
    return around_middle(queries, keys, n, middle, LEVEL)[0]


@gluon.jit
def scores_by_halves(queries, keys, n, points, marks, steep, one, other, queries_s, keys_s, LAYOUT: gl.constexpr):
    """Return the scores of a steep chunk; those of pairs whose key is later are arbitrary.

    The scores in blocks of 16 tokens, or if `steep` is 2 of tokens with themselves, are still to be computed, as the
    product of `one` and `other`.
    Queries and keys for the state are stored in `queries_s` and `keys_s`, while products run.
    """
    pairs = gl.zeros([64, 64], gl.float32, PAIRS)
    barrier()
    one.store(of_half(queries, keys, n, marks, 0))
    other.store(of_half(queries, keys, n, marks, 1))
    fence_async_shared()
    barrier()
    A, A1 = square(one, pairs), square(other, pairs)
    queries_s.store(times(queries, exponent_after(n, at_start(points, LAYOUT))))
    keys_s.store(times(keys, exponent_before(n, at_end(points, LAYOUT))))
    A, A1 = warpgroup_mma_wait(0, deps=[A, A1])
    A = gl.where(apart() >= 32, A, A1)
    barrier()
    if steep == 1:
        near = near_middle(queries, keys, n, middle_across(n, marks, 2))
        one.store(near[0])
        other.store(near[1])
    else:
        for pair in gl.static_range(2):
            one.store(of_half(queries, keys, n, marks, 2 * pair + 2))
            other.store(of_half(queries, keys, n, marks, 2 * pair + 3))
            fence_async_shared()
            barrier()
            A1, A2 = square(one, pairs), square(other, pairs)
            A1, A2 = warpgroup_mma_wait(0, deps=[A1, A2])
            A = gl.where(apart() >= (16 >> 2 * pair), A, gl.where(apart() >= (8 >> 2 * pair), A1, A2))
            barrier()
        one.store(queries)
        other.store(keys)
    return A


@gluon.jit
def gradients_of_level(
    read_s, written_s, n, middle, pairs_s, change_s, scores_s, tile_s, dQ, dK, level, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Add the part of a level's pairs to the gradients of queries and keys, and put their scores into `scores_s`."""
    tile, e = around_middle(read_s.load(LAYOUT), written_s.load(LAYOUT), n, middle, level)
    tile_s.store(tile)
    others = gl.where(apart() >> (5 - level) == 1, 0, -1).to(gl.int16)
    change_s.store(either(pairs_s.load(PAIRS), gl.zeros([64, 64], gl.bfloat16, PAIRS), others))
    fence_async_shared()
    barrier()
    A = square(tile_s, gl.zeros([64, 64], gl.float32, PAIRS))
    channels = gl.zeros([64, n.shape[1]], gl.float32, LAYOUT)
    change = warpgroup_mma(change_s, tile_s, channels, use_acc=False, is_async=True)
    A = warpgroup_mma_wait(1, deps=[A]).to(gl.bfloat16)
    scores_s.store(either(A, scores_s.load(PAIRS), others))
    change = warpgroup_mma_wait(0, deps=[change])
    barrier()
    change *= power(e)
    first = gl.where(first_halves(level, LAYOUT) == 0, 0.0, 1.0)
    return dQ + change * (1.0 - first), dK + change * first


@gluon.jit
def gradients_by_halves(
    read_s, written_s, values_s, grad_s, before_s, exponents_s, points, marks, steep, enter_s, leave_s, pairs_s,
    scores_s, lower_s, D, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Return the gradients of queries, and of keys without those through the state, of a steep chunk; D = dO Vᵀ.

    They are gradients of the queries and keys in `read_s` and `written_s`, without pairs of a token with itself. Scores
    are stored in `scores_s`, queries and keys for the state in `enter_s` and `leave_s`. Meanwhile the memory of the
    triangle has the scores, since registers are short here.
    """
    zeros, none = gl.zeros([64, 64], gl.float32, PAIRS), gl.zeros([64, 64], gl.bfloat16, PAIRS)
    swapped = warpgroup_mma(values_s, grad_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
    D = gl.where(distance() > 0, D, warpgroup_mma_wait(0, deps=[swapped]))
    barrier()
    pairs_s.store(D.to(gl.bfloat16))
    room = pairs_s, scores_s, lower_s, enter_s
    dQ = gl.zeros(exponents_s.load(LAYOUT).shape, gl.float32, LAYOUT)
    dK = dQ
    for level in range(1 + steep):
        n = exponents_s.load(LAYOUT)
        dQ, dK = gradients_of_level(read_s, written_s, n, middle_across(n, marks, level), *room, dQ, dK, level, LAYOUT)
    if steep == 1:
        n = exponents_s.load(LAYOUT)
        channels = gl.zeros([64, n.shape[1]], gl.float32, LAYOUT)
        near = near_middle(read_s.load(LAYOUT), written_s.load(LAYOUT), n, middle_across(n, marks, 2))
        enter_s.store(near[0])
        leave_s.store(near[1])
        scores_s.store(gl.where((distance() > 0) & (apart() < 16), pairs_s.load(PAIRS), none))
        fence_async_shared()
        barrier()
        A = warpgroup_mma(enter_s, leave_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
        change = warpgroup_mma(scores_s, leave_s, channels, use_acc=False, is_async=True)
        A = warpgroup_mma_wait(1, deps=[A]).to(gl.bfloat16)
        lower_s.store(gl.where(apart() < 16, A, lower_s.load(PAIRS)))
        change = warpgroup_mma_wait(0, deps=[change])
        barrier()
        dQ += power(near[2]) * change
        change = warpgroup_mma(scores_s.permute((1, 0)), enter_s, channels, use_acc=False, is_async=True)
        change = warpgroup_mma_wait(0, deps=[change])
        barrier()
        dK += power(near[3]) * change
    else:
        for level in range(3, 6):
            n = exponents_s.load(LAYOUT)
            dQ, dK = gradients_of_level(read_s, written_s, n, middle_inside(n, level), *room, dQ, dK, level, LAYOUT)
        itself = warpgroup_mma(read_s, written_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
        itself = warpgroup_mma_wait(0, deps=[itself]).to(gl.bfloat16)
        lower_s.store(gl.where(apart() == 0, itself, lower_s.load(PAIRS)))
    n = exponents_s.load(LAYOUT)
    channels = gl.zeros([64, n.shape[1]], gl.float32, LAYOUT)
    through = warpgroup_mma(grad_s, before_s.permute((1, 0)), channels, use_acc=False, is_async=True)
    scores_s.store(gl.where(distance() >= 0, lower_s.load(PAIRS), none))
    lower_triangle(lower_s)
    e = exponent_after(n, at_start(points, LAYOUT))
    enter_s.store(times(read_s.load(LAYOUT), e))
    leave_s.store(times(written_s.load(LAYOUT), exponent_before(n, at_end(points, LAYOUT))))
    through = warpgroup_mma_wait(0, deps=[through])
    barrier()
    return dQ + power(e) * through, dK


@gluon.jit
def lower_triangle(shared):
    """Store ones on and below the diagonal."""
    shared.store((distance() >= 0).to(gl.bfloat16))
