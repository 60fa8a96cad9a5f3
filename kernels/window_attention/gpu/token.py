"""Attention of one new token per row in two launches: to parts of the earlier tokens, and to these and the new token.

A program of the first launch has some of the earlier tokens of a row, and the query heads of one key head, or one query
head. It counts tokens by their age from the newest on, as log decays add up in this order. The second launch combines
these parts with the new token, whose entries it writes: no program reads an entry that another one writes.

Both normalise and turn the query, and the second one the new key: that takes less time than to launch another kernel.
Results are rounded as if they were written to memory in between.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.allocation import new
from ...forget_gate.gpu.op import log_sigmoid
from ...gpu.device import multiprocessors
from ...gpu.launch import cdiv, enqueue, next_power_of_2
from ...gpu.overlap import prefetch, wait
from ...gpu.rows import load, rows_of
from ...gpu.tiles import LOG2E, exp2, factor_dtype, load_tile, sigmoid
from ...norm import QKNorm
from ...norm.gpu.op import strided
from ..token import AttentionOps, TokenAttention
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


@triton.jit
def turns_of(
    position, rates, amplitude,
    START: tl.constexpr, N: tl.constexpr, TURN: tl.constexpr, TURNING: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Return N channels from START on, their factors, the factors of the others of their pairs, and these others.

    The compiler repeats sines in every thread that needs them, unless they are made of a load with a number for each
    thread. It gives the layout of such a load to all later results, but only up to a new axis.
    """
    c = START + tl.arange(0, N)
    cos, sin, other = c, c, c
    if TURNING:
        FIRST: tl.constexpr = TURN[0]
        P: tl.constexpr = TURN[1]
        ROWS: tl.constexpr = max(1, LANES // N)
        lane = tl.arange(0, ROWS * N)
        pair = START + lane - FIRST
        inside, low = (lane < N) & (pair >= 0) & (pair < 2 * P), pair < P
        angle = position.to(tl.float32) * load(rates, tl.where(low, pair, pair - P), inside)
        cos = tl.where(lane < N, tl.cos(angle) * tl.where(inside, amplitude, 1.0), 0.0)
        sin = tl.sin(angle) * tl.where(low, -amplitude, amplitude)  # 0 where nothing turns
        cos = tl.sum(tl.reshape(cos[None, :], [ROWS, N]), 0)
        sin = tl.sum(tl.reshape(sin[None, :], [ROWS, N]), 0)
        other = tl.where((c < FIRST) | (c >= FIRST + 2 * P), c, tl.where(c < FIRST + P, c + P, c - P))
    return c, cos, sin, other


@triton.jit
def inverse_root(x, real, eps, N: tl.constexpr):
    """Return 1 / √(mean x² + eps) of the first N channels of a head x, or of several heads [ROWS,1]."""
    root = 1.0
    if N > 0:
        c = tl.arange(0, triton.next_power_of_2(N))
        inside = c < N
        if real is not None:
            inside, c = real & inside[None, :], c[None, :]
        y = load(x, c, inside)
        root = tl.rsqrt(tl.sum(y * y, -1, keep_dims=True) / N + eps)
    return root


@triton.jit
def normed(x, c, inside, weight, root, offset, N: tl.constexpr):
    """Load the channels c of heads x, and normalise those below N."""
    y = load(x, c, inside)
    if N > 0:
        scale = offset
        if weight is not None:
            scale += load(weight, c, c < N)
        y = tl.where(c < N, y * root * scale, y).to(x.dtype.element_ty).to(tl.float32)
    return y


@triton.jit
def channels_of(x, real, turns, weight, root, offset, STOP: tl.constexpr, N: tl.constexpr, TURNING: tl.constexpr):
    """Load the channels below STOP of a head x, or of several heads [ROWS,1], and normalise and turn them."""
    c, cos, sin, other = turns
    inside = c < STOP
    if real is not None:
        inside, cos, sin, other, c = real & inside[None, :], cos[None, :], sin[None, :], other[None, :], c[None, :]
    y = normed(x, c, inside, weight, root, offset, N)
    if TURNING:
        y = y * cos + normed(x, other, inside, weight, root, offset, N) * sin
        y = y.to(x.dtype.element_ty).to(tl.float32)
    return y


@triton.jit(do_not_specialize=["R", "window"])
def attend_to_part(
    q, q_rest,  # [B,1,H,D], and [B,1,H,D−FIRST] if the channels from FIRST on are there, or None
    q_weight, positions, rates,  # of the norm of the query, [B] and [P]; each may be None
    k, v, log_decay,  # caches [B,R,Hkv,D], [B,R,Hkv,V], [B,R,H]
    seen,  # [B]
    sums,  # [B,H,SPLITS,V]: values, weighted relative to the largest weight
    about,  # [B,H,SPLITS,4]: the largest score in log2 units, the sum of weights, and the sum of the log decays
    R, window, scale, q_eps, q_offset, amplitude, q_row, rest_row, rest_head, k_row, v_row, g_row,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    FIRST: tl.constexpr, BF: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr,  # channels of the first product
    SAME: tl.constexpr,  # whether the values are the first V channels of the keys
    NORMS: tl.constexpr,  # channels of a query and of a key that are normalised
    TURN: tl.constexpr,  # first channel that turns, number of pairs, whether the first FIRST channels have some, others
    LANES: tl.constexpr,  # threads of a program
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
    prefetch(q_weight, 0, NORMS[0], NORMS[0], OVERLAP)
    prefetch(rates, 0, TURN[1], TURN[1], OVERLAP)
    wait(OVERLAP)
    tokens = tl.load(seen + b).to(tl.int32)
    first, stop = part_of(tokens, window, split, SPLITS, BLOCK)
    place = (b * H + head) * SPLITS + split
    q += b * q_row
    k += b * R * k_row + kv * D
    v += b * R * v_row + kv * V
    cf, cr, cv = tl.arange(0, BF), tl.arange(0, BR), tl.arange(0, BV)
    rows = None if ROWS == 1 else real[:, None]
    h = head if ROWS == 1 else head[:, None]
    heads = q + h * D
    rest = heads if q_rest is None else q_rest + b * rest_row + h * rest_head - FIRST
    position = tl.load(positions + b) if positions is not None else tokens
    turns_f = turns_of(position, rates, amplitude, 0, BF, TURN, TURN[2], LANES)
    turns_r = turns_of(position, rates, amplitude, FIRST, BR, TURN, TURN[3], LANES)
    root = inverse_root(heads, rows, q_eps, NORMS[0])
    qf = channels_of(heads, rows, turns_f, q_weight, root, q_offset, FIRST, NORMS[0], TURN[2])
    qr = channels_of(rest, rows, turns_r, q_weight, root, q_offset, D, NORMS[0], TURN[3])
    if log_decay is not None:  # before the loop, so that its end does not wait for memory
        last = decays_after(log_decay, tokens, stop, real & (stop > first), b * R, R, g_row, head)
    if ROWS == 1:
        # each token of a block has separate sums, added up at the end: no thread waits for others in the loop
        largest, weights = tl.full([BLOCK], SMALLEST, tl.float32), tl.zeros([BLOCK], tl.float32)
        total, decay = tl.zeros([BLOCK, BV], tl.float32), tl.full([], 0.0, tl.float32)
    else:
        qf, qr = qf.to(DTYPE), qr.to(DTYPE)
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
                scores = tl.dot(qr, tl.trans(kr.to(DTYPE)), scores)
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
        tl.store(about + place * 4 + 2, decay + last, mask=real)
    tl.store(about + place * 4, largest, mask=real)
    tl.store(about + place * 4 + 1, weights, mask=real)


@triton.jit(do_not_specialize=["R"])
def add_newest(
    q, q_rest, k_new, v_new, g_new,  # as above, [B,1,Hkv,D], [B,1,Hkv,V], [B,1,H]
    q_weight, k_weight, positions, rates,  # as above
    bias,  # [H]: g_new has raw gates; or None
    gate,  # of the output of each head [B,H] or channel [B,H·V]; or None
    k, v, log_decay, seen, sums, about,  # as above
    following,  # [B]: becomes seen + 1; or None
    o,  # [B,1,H,V]
    R, scale, q_eps, q_offset, k_eps, k_offset, amplitude,
    q_row, rest_row, rest_head, k_new_row, v_new_row, g_new_row, gate_row, k_row, v_row, g_row,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    FIRST: tl.constexpr, BF: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr, SAME: tl.constexpr,
    NORMS: tl.constexpr, TURN: tl.constexpr, LANES: tl.constexpr,
    CHANNELS: tl.constexpr,  # whether each channel has a gate
    SPLITS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Combine the parts of a head with the new token, for BV channels of the output, and write its entries."""
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    block, place = tl.program_id(0) % BLOCKS, (tl.program_id(0) // BLOCKS).to(tl.int64)
    b, head = place // H, place % H
    kv = head // G
    cv, split = block * BV + tl.arange(0, BV), tl.arange(0, SPLITS)
    prefetch(q_weight, 0, NORMS[0], NORMS[0], OVERLAP)
    prefetch(k_weight, 0, NORMS[1], NORMS[1], OVERLAP)
    prefetch(rates, 0, TURN[1], TURN[1], OVERLAP)
    prefetch(bias, 0, H, H, OVERLAP)
    wait(OVERLAP)
    tokens = tl.load(seen + b)
    at = b * R + tokens % R
    if following is not None:
        tl.store(following + b, tokens + 1, mask=(head == 0) & (block == 0))
    position = tl.load(positions + b) if positions is not None else tokens
    turns_f = turns_of(position, rates, amplitude, 0, BF, TURN, TURN[2], LANES)
    turns_r = turns_of(position, rates, amplitude, FIRST, BR, TURN, TURN[3], LANES)
    q += b * q_row + head * D
    rest = q if q_rest is None else q_rest + b * rest_row + head * rest_head - FIRST
    k_new += b * k_new_row + kv * D
    q_root, k_root = inverse_root(q, None, q_eps, NORMS[0]), inverse_root(k_new, None, k_eps, NORMS[1])
    qf = channels_of(q, None, turns_f, q_weight, q_root, q_offset, FIRST, NORMS[0], TURN[2])
    kf = channels_of(k_new, None, turns_f, k_weight, k_root, k_offset, FIRST, NORMS[1], TURN[2])
    score = tl.sum(kf * qf, 0)
    if D > FIRST:
        qr = channels_of(rest, None, turns_r, q_weight, q_root, q_offset, D, NORMS[0], TURN[3])
        kr = channels_of(k_new, None, turns_r, k_weight, k_root, k_offset, D, NORMS[1], TURN[3])
        score += tl.sum(kr * qr, 0)
    score *= scale
    if SAME:
        value = normed(k_new, cv, cv < V, k_weight, k_root, k_offset, NORMS[1])
    else:
        value = load(v_new, b * v_new_row + kv * V + cv, cv < V)
    parts = place * SPLITS + split
    weights = tl.load(about + parts * 4 + 1)
    largest = tl.where(weights == 0, float("-inf"), tl.load(about + parts * 4))  # NaN stays
    if log_decay is not None:
        g = tl.load(g_new + b * g_new_row + head).to(tl.float32)
        if bias is not None:
            g = log_sigmoid(g + tl.load(bias + head).to(tl.float32))
        g = g.to(log_decay.dtype.element_ty)
        newer = resets(tl.load(about + parts * 4 - 2, mask=split > 0, other=0.0))  # sums of the parts before
        largest += (resets(g.to(tl.float32)) + tl.cumsum(newer, 0)) * LOG2E
        tl.store(log_decay + at * g_row + head, g, mask=block == 0)
    most = tl.maximum(tl.max(largest, 0), score)
    shrink, p = exp2(largest - most), exp2(score - most)
    inside = (weights != 0)[:, None] & (cv < V)[None, :]
    total = tl.load(sums + parts[:, None] * V + cv[None, :], mask=inside, other=0.0)
    y = tl.sum(total * shrink[:, None], 0) + p * value
    y /= tl.sum(weights * shrink, 0) + p
    if gate is not None:
        y = y.to(o.dtype.element_ty).to(tl.float32)
        if CHANNELS:
            y *= sigmoid(load(gate, b * gate_row + head * V + cv, cv < V))
        else:
            y *= sigmoid(tl.load(gate + b * gate_row + head).to(tl.float32))
    tl.store(o + place * V + cv, y.to(o.dtype.element_ty), mask=cv < V)
    owner = head % G == 0
    k += at * k_row + kv * D
    tl.store(k + turns_f[0], kf.to(k.dtype.element_ty), mask=(turns_f[0] < FIRST) & owner & (block == 0))
    if D > FIRST:
        tl.store(k + turns_r[0], kr.to(k.dtype.element_ty), mask=(turns_r[0] < D) & owner & (block == 0))
    if not SAME:
        tl.store(v + at * v_row + kv * V + cv, value.to(v.dtype.element_ty), mask=(cv < V) & owner)


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
    log_decay, same = decays[0] if decays else None, a.shared
    how = launches_of(B, H, heads, D, V, a.window, k, same)
    first = V if same else next_power_of_2(D + 1) // 2  # the largest power of two, and the rest
    blocks = [max(16, next_power_of_2(size)) for size in (first, max(D - first, 1), V)]
    sums, about = (new(a.q, B, H, how.splits, size, dtype=torch.float32) for size in (V, 4))
    o = new(a.q, B, 1, H, V)
    (q, q_row), *entries = (strided(x) for x in (a.q, *a.new[:2]))
    g_new, _, g_new_row = (None, 0, 0) if log_decay is None else rows_of(a.new[2])
    strides = k.stride(1), v.stride(1), 0 if log_decay is None else log_decay.stride(1)
    q_norm, k_norm, _, turn, bias, gate, rest = a.cache.ops or AttentionOps()
    bias = None if bias is None else bias.contiguous()
    rest_strides = (0, 0) if rest is None else (rest.stride(0), rest.stride(2))
    norms = [QKNorm(0, None, 0.0) if norm is None else norm for norm in (q_norm, k_norm)]
    weights = [None if norm.weight is None else norm.weight.contiguous() for norm in norms]
    numbers = [(float(norm.eps), 1.0 if norm.weight is None else float(norm.offset)) for norm in norms]
    positions, rates, amplitude, turned = None, None, 1.0, (0, 0, False, False)
    if turn is not None:
        positions, rates, amplitude = turn.positions.contiguous(), turn.rates.contiguous(), float(turn.amplitude)
        start, pairs = D - 2 * len(rates) if turn.last else 0, len(rates)
        turned = (start, pairs, start < first, start + 2 * pairs > first)
    sizes: dict[str, Any] = {"H": H, "G": H // heads, "D": D, "V": V, "SAME": same, "SPLITS": how.splits}
    sizes |= {"FIRST": first, "BF": blocks[0], "BR": blocks[1], "NORMS": tuple(x.size for x in norms), "TURN": turned}
    scale = a.scale * LOG2E.value
    enqueue(
        attend_to_part,
        B * (H if how.rows == 1 else heads * cdiv(H // heads, how.rows)) * how.splits,
        *(q, rest, weights[0], positions, rates, k, v, log_decay, a.cache.seen, sums, about),
        *(R, a.window, scale, *numbers[0], amplitude, q_row, *rest_strides, *strides),
        **sizes,
        **{"BV": blocks[2], "ROWS": how.rows, "BLOCK": how.block, "STAGES": how.stages, "DTYPE": factor_dtype(k.dtype)},
        LANES=32 * how.warps,
        warps=how.warps,
        overlap=True,
    )
    narrow = min(blocks[2], max(16, TILE // how.splits))
    warps = max(1, min(narrow * how.splits // 512, 4))
    (k_new, k_new_row), (v_new, v_new_row) = entries
    gate, _, gate_row = (None, 0, 0) if gate is None else rows_of(gate)
    enqueue(
        add_newest,
        B * H * cdiv(V, narrow),
        *(q, rest, k_new, v_new, g_new, *weights, positions, rates, bias, gate),
        *(k, v, log_decay, a.cache.seen, sums, about, a.cache.following, o),
        *(R, scale, *numbers[0], *numbers[1], amplitude),
        *(q_row, *rest_strides, k_new_row, v_new_row, g_new_row, gate_row, *strides),
        **sizes,
        **{"BV": narrow, "CHANNELS": gate is not None and gate.shape[-1] > H, "LANES": 32 * warps, "warps": warps},
        overlap=True,
    )
    return o
