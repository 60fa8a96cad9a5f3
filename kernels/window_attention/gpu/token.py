"""Attention of one new token per row in two launches: to parts of the earlier tokens, and to these and the new token.

A program of the first launch has some of the earlier tokens of a row, and the query heads of one key head, or one query
head. It counts tokens by their age from the newest on, as log decays add up in this order. The second launch combines
these parts with the new token, whose entries it writes: no program reads an entry that another one writes.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.allocation import new
from ...gpu.device import multiprocessors
from ...gpu.launch import cdiv, enqueue, next_power_of_2
from ...gpu.overlap import wait
from ...gpu.rows import load
from ...gpu.tiles import LOG2E, exp2, factor_dtype, load_tile
from ...norm.gpu.op import strided
from ..token import TokenAttention
from .decays import LEAST

SMALLEST = tl.constexpr(-1e30)  # a maximum of no scores
MOST_SPLITS = 128  # parts of a row
SHARED_MEMORY = 200 << 10  # bytes of a multiprocessor that its programs may fill together
RESIDENT = 4  # programs of a multiprocessor: together they have enough loads under way
TILE = 4096  # elements of keys that a program without products of matrices loads at a time


@triton.jit
def resets(log_decay):
    """The log decays, of which those of resets become −∞."""
    return tl.where(log_decay < LEAST, float("-inf"), log_decay)


@triton.jit
def part_of(seen, window, split, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """The ages [first, stop) of a part of the earlier tokens; the newest one has the age 0."""
    count = tl.minimum(seen, window - 1)
    each = (count + SPLITS * BLOCK - 1) // (SPLITS * BLOCK) * BLOCK
    return split * each, tl.minimum(split * each + each, count)


@triton.jit
def index_of(seen, age, R):
    """Index of the tokens of some ages in a cache of R entries, for ages below R."""
    index = seen % R - 1 - age
    return tl.where(index < 0, index + R, index).to(tl.int64)


@triton.jit
def decays_after(log_decay, seen, age, inside, first, R, stride, head):
    """The log decays of the tokens that follow those of some ages, for caches that begin at the entry `first`."""
    return resets(load(log_decay, (first + index_of(seen, age - 1, R)) * stride + head, inside))


@triton.jit(do_not_specialize=["R", "window"])
def attend_to_part(
    q,  # [B,1,H,D]
    k, v, log_decay,  # caches [B,R,Hkv,D], [B,R,Hkv,V], [B,R,H]
    seen,  # [B]
    sums,  # [B,H,SPLITS,V]: values, weighted relative to the largest weight
    about,  # [B,H,SPLITS,4]: the largest score in log2 units, the sum of weights, and the sum of the log decays
    R, window, scale, q_row, k_row, v_row, g_row,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    FIRST: tl.constexpr, BF: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr,  # channels of the first product
    SAME: tl.constexpr,  # whether the values are the first V channels of the keys
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    split, unit = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    UNITS: tl.constexpr = H if ROWS == 1 else H // G * ((G + ROWS - 1) // ROWS)  # of a row
    b = (unit // UNITS).to(tl.int64)
    if ROWS == 1:
        head, real = unit % H, unit >= 0
        kv = head // G
    else:
        group = unit % UNITS
        kv = group // (UNITS // (H // G))
        row = group % (UNITS // (H // G)) * ROWS + tl.arange(0, ROWS)
        head, real = kv * G + row, row < G
    wait(OVERLAP)
    tokens = tl.load(seen + b).to(tl.int32)
    first, stop = part_of(tokens, window, split, SPLITS, BLOCK)
    place = (b * H + head) * SPLITS + split
    q += b * q_row
    k += b * R * k_row + kv * D
    v += b * R * v_row + kv * V
    cf, cr, cv = tl.arange(0, BF), tl.arange(0, BR), tl.arange(0, BV)
    if ROWS == 1:
        qf, qr = load(q + head * D, cf, cf < FIRST), load(q + head * D + FIRST, cr, cr < D - FIRST)
        # each token of a block has separate sums, added up at the end: no thread waits for others in the loop
        largest, weights = tl.full([BLOCK], SMALLEST, tl.float32), tl.zeros([BLOCK], tl.float32)
        total, decay = tl.zeros([BLOCK, BV], tl.float32), tl.full([], 0.0, tl.float32)
    else:
        qf = load_tile(q, head, D, cf, real, FIRST, BF).to(DTYPE)
        qr = tl.load(q + head[:, None] * D + FIRST + cr[None, :], real[:, None] & (cr < D - FIRST)[None, :], 0.0)
        largest, weights = tl.full([ROWS], SMALLEST, tl.float32), tl.zeros([ROWS], tl.float32)
        total, decay = tl.zeros([ROWS, BV], tl.float32), tl.zeros([ROWS], tl.float32)
    for start in tl.range(first, stop, BLOCK, num_stages=STAGES):
        age = start + tl.arange(0, BLOCK)
        live = age < stop
        at = index_of(tokens, age, R)
        kf = load_tile(k, at, k_row, cf, live, FIRST, BF)
        vt = kf if SAME else load_tile(v, at, v_row, cv, live, V, BV)
        if ROWS == 1:
            scores = tl.sum(kf.to(tl.float32) * qf[None, :], 1)
            if D > FIRST:
                kr = load_tile(k + FIRST, at, k_row, cr, live, D - FIRST, BR)
                scores += tl.sum(kr.to(tl.float32) * qr[None, :], 1)
            scores *= scale
            if log_decay is not None:
                g = decays_after(log_decay, tokens, age, live & (age > first), b * R, R, g_row, head)
                scores += (decay + tl.cumsum(g, 0)) * LOG2E
                decay += tl.sum(g, 0)
            scores = tl.where(live, scores, float("-inf"))
            larger = tl.maximum(largest, scores)
            p, shrink = exp2(scores - larger), exp2(largest - larger)
            weights = weights * shrink + p
            total = total * shrink[:, None] + p[:, None] * vt.to(tl.float32)
        else:
            scores = tl.dot(qf, tl.trans(kf.to(DTYPE)))
            if D > FIRST:
                kr = load_tile(k + FIRST, at, k_row, cr, live, D - FIRST, BR)
                scores = tl.dot(qr.to(DTYPE), tl.trans(kr.to(DTYPE)), scores)
            scores *= scale
            if log_decay is not None:
                inside = real[:, None] & (live & (age > first))[None, :]
                g = decays_after(log_decay, tokens, age[None, :], inside, b * R, R, g_row, head[:, None])
                scores += (decay[:, None] + tl.cumsum(g, 1)) * LOG2E
                decay += tl.sum(g, 1)
            scores = tl.where(live[None, :], scores, float("-inf"))
            larger = tl.maximum(largest, tl.max(scores, 1))
            p, shrink = exp2(scores - larger[:, None]), exp2(largest - larger)
            weights = weights * shrink + tl.sum(p, 1)
            total = tl.dot(p.to(DTYPE), vt.to(DTYPE), total * shrink[:, None])
        largest = larger
    some = stop > first
    if ROWS == 1:
        larger = tl.max(largest, 0)
        shrink = exp2(largest - larger)
        largest, weights = larger, tl.sum(weights * shrink, 0)
        tl.store(sums + place * V + cv, tl.sum(total * shrink[:, None], 0), mask=some & (cv < V))
    else:
        tl.store(sums + place[:, None] * V + cv[None, :], total, mask=(real & some)[:, None] & (cv < V)[None, :])
    if log_decay is not None:
        decay += decays_after(log_decay, tokens, stop, real & some, b * R, R, g_row, head)
        tl.store(about + place * 4 + 2, decay, mask=real)
    tl.store(about + place * 4, largest, mask=real)
    tl.store(about + place * 4 + 1, weights, mask=real)


@triton.jit(do_not_specialize=["R"])
def add_newest(
    q, k_new, v_new, g_new,  # [B,1,H,D], [B,1,Hkv,D], [B,1,Hkv,V], [B,1,H]
    k, v, log_decay, seen, sums, about,  # as above
    following,  # [B]: becomes seen + 1; or None
    o,  # [B,1,H,V]
    R, scale, q_row, k_new_row, v_new_row, g_new_row, k_row, v_row, g_row,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    BD: tl.constexpr, BV: tl.constexpr, SAME: tl.constexpr, SPLITS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Combine the parts of a head with the new token, for BV channels of the output, and write its entries."""
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    block, place = tl.program_id(0) % BLOCKS, (tl.program_id(0) // BLOCKS).to(tl.int64)
    b, head = place // H, place % H
    kv = head // G
    c, cv, split = tl.arange(0, BD), block * BV + tl.arange(0, BV), tl.arange(0, SPLITS)
    wait(OVERLAP)
    tokens = tl.load(seen + b)
    at = b * R + tokens % R
    if following is not None:
        tl.store(following + b, tokens + 1, mask=(head == 0) & (block == 0))
    key = tl.load(k_new + b * k_new_row + kv * D + c, mask=c < D, other=0.0)
    value = tl.load(v_new + b * v_new_row + kv * V + cv, mask=cv < V, other=0.0)
    score = tl.sum(key.to(tl.float32) * load(q, b * q_row + head * D + c, c < D), 0) * scale
    parts = place * SPLITS + split
    weights = tl.load(about + parts * 4 + 1)
    largest = tl.where(weights == 0, float("-inf"), tl.load(about + parts * 4))  # NaN stays
    if log_decay is not None:
        g = tl.load(g_new + b * g_new_row + head)
        newer = resets(tl.load(about + parts * 4 - 2, mask=split > 0, other=0.0))  # sums of the parts before
        largest += (resets(g) + tl.cumsum(newer, 0)) * LOG2E
        tl.store(log_decay + at * g_row + head, g.to(log_decay.dtype.element_ty), mask=block == 0)
    most = tl.maximum(tl.max(largest, 0), score)
    shrink, p = exp2(largest - most), exp2(score - most)
    inside = (weights != 0)[:, None] & (cv < V)[None, :]
    total = tl.load(sums + parts[:, None] * V + cv[None, :], mask=inside, other=0.0)
    y = tl.sum(total * shrink[:, None], 0) + p * value.to(tl.float32)
    y /= tl.sum(weights * shrink, 0) + p
    tl.store(o + place * V + cv, y.to(o.dtype.element_ty), mask=cv < V)
    owner = head % G == 0
    tl.store(k + at * k_row + kv * D + c, key, mask=(c < D) & owner & (block == 0))
    if not SAME:
        tl.store(v + at * v_row + kv * V + cv, value, mask=(cv < V) & owner)


class Launches(NamedTuple):
    """The launches of a call; `rows` is 1 if programs have a query head, otherwise that of a product of matrices."""

    rows: int
    block: int  # tokens
    splits: int
    warps: int
    stages: int


def launches_of(rows: int, H: int, heads: int, D: int, V: int, window: int, x: Tensor, same: bool) -> Launches:
    """Return the launches for `rows` rows of H query heads and `heads` key heads; x is any cache of the call.

    Programs fill the device once, if there are enough tokens, and load about 4096 elements of keys at a time.
    """
    group, width = H // heads, next_power_of_2(max(V, D // 2 + 1))
    products = group > 1 and x.dtype != torch.float32
    height = min(max(16, next_power_of_2(group)), 32) if products else 1
    units = rows * (heads * cdiv(group, height) if products else H)
    block = max(32 if products else 16, min(TILE // width, 64 if products else 128))
    warps, stages = (8, 2) if height * width >= 16384 else (4, 3)  # also fits into 99 KiB of shared memory
    memory = (stages - 1) * block * (D if same else D + V) * x.element_size()
    programs = multiprocessors(x.device) * max(1, min(SHARED_MEMORY // memory, RESIDENT))
    most = min(MOST_SPLITS, next_power_of_2(cdiv(window, block)))
    splits = max(1, min(next_power_of_2(programs // units + 1) // 2, most))
    return Launches(height, block, splits, warps, stages)


def forward(a: TokenAttention) -> Tensor:
    """o [B,1,H,V]; the arguments are checked."""
    (B, _, H, D), (k, v, *decays) = a.q.shape, a.cache.entries
    R, heads, V = v.shape[1:]
    log_decay = decays[0] if decays else None
    same = v.data_ptr() == k.data_ptr() and v.stride(1) == k.stride(1) and heads == 1 and V <= D
    how = launches_of(B, H, heads, D, V, a.window, k, same)
    first = V if same else next_power_of_2(D + 1) // 2  # the largest power of two, and the rest
    blocks = [max(16, next_power_of_2(size)) for size in (first, max(D - first, 1), V)]
    sums, about = (new(a.q, B, H, how.splits, size, dtype=torch.float32) for size in (V, 4))
    o = new(a.q, B, 1, H, V)
    (q, q_row), *entries = (strided(x) for x in (a.q, *a.new[:2]))
    g_new, g_new_row = (None, 0) if log_decay is None else (a.new[2], a.new[2].stride(0))
    strides = k.stride(1), v.stride(1), 0 if log_decay is None else log_decay.stride(1)
    sizes: dict[str, Any] = {"H": H, "G": H // heads, "D": D, "V": V, "SAME": same, "SPLITS": how.splits}
    scale = a.scale * LOG2E.value
    enqueue(
        attend_to_part,
        B * (H if how.rows == 1 else heads * cdiv(H // heads, how.rows)) * how.splits,
        *(q, k, v, log_decay, a.cache.seen, sums, about, R, a.window, scale, q_row, *strides),
        **sizes,
        **dict(zip(("FIRST", "BF", "BR", "BV"), (first, *blocks), strict=True)),
        **{"ROWS": how.rows, "BLOCK": how.block, "STAGES": how.stages, "DTYPE": factor_dtype(k.dtype)},
        warps=how.warps,
        overlap=True,
    )
    narrow = min(blocks[2], max(16, TILE // how.splits))
    (k_new, k_new_row), (v_new, v_new_row) = entries
    enqueue(
        add_newest,
        B * H * cdiv(V, narrow),
        *(q, k_new, v_new, g_new, k, v, log_decay, a.cache.seen, sums, about, a.cache.following, o),
        *(R, scale, q_row, k_new_row, v_new_row, g_new_row, *strides),
        **sizes,
        **{"BD": next_power_of_2(D), "BV": narrow},
        warps=max(1, min(narrow * how.splits // 512, 4)),
        overlap=True,
    )
    return o
