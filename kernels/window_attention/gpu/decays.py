"""Sums of log decays along time, and the gradient of the log decays.

Programs walk along the tokens of one head. A segment begins at the first token of a row or document, and at a reset.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from ...gpu.tiles import LOG2E
from .. import decay

LEAST = tl.constexpr(decay.LEAST)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def segmented(a, a_begins, b, b_begins):
    """A step of a scan whose sums begin anew where a flag is set."""
    return tl.where(b_begins > 0, b, a + b), a_begins | b_begins


@triton.jit
def load_decays(log_decay, positions, t, T, H: tl.constexpr):
    """The log decays of a head at tokens t, and whether a segment begins there; True outside the row."""
    inside = (t >= 0) & (t < T)
    g = tl.load(log_decay + t.to(tl.int64) * H, mask=inside, other=0.0)
    begins = (g < LEAST) | (t == 0) | ~inside
    if positions is not None:
        begins = begins | (tl.load(positions + t, mask=inside, other=0) == 0)
    return g, begins


@triton.jit(do_not_specialize=["T", "window"])
def sum_decays(
    log_decay,  # [B,T,H]
    positions,  # [T], of packed documents
    tokens,  # [B,H,T,4]: the sum F in log2 units, as bits of an integer and a remainder; the first key a query sees
    T, window, H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    log_decay += row // H * T * H + row % H
    tokens += row * T * 4
    before, start = tl.full([], 0.0, tl.float64), 0
    for block in tl.range(0, T, BLOCK):
        t = block + tl.arange(0, BLOCK)
        g, begins = load_decays(log_decay, positions, t, T, H)
        g = tl.where(begins, 0.0, g.to(tl.float64) * LOG2E)  # no score depends on the decay of a first token
        total = before + tl.cumsum(g, 0)
        before += tl.sum(g, 0)
        integer = tl.floor(total)
        bits = tl.maximum(integer, -(2.0**31) + 1).to(tl.int32).to(tl.float32, bitcast=True)
        tl.store(tokens + t * 4, bits, mask=t < T)
        tl.store(tokens + t * 4 + 1, (total - integer).to(tl.float32), mask=t < T)
        starts = tl.where(begins & (t < T), t, 0)
        seen = tl.maximum(tl.associative_scan(starts, 0, larger), start)
        start = tl.maximum(tl.max(starts, 0), start)
        tl.store(tokens + t * 4 + 2, tl.maximum(seen, t - window + 1).to(tl.float32), mask=t < T)


@triton.jit(do_not_specialize=["T"])
def differentiate_decays(
    log_decay, positions,
    of_queries, of_keys,  # [B,H,T]: sums of the gradients of all scores of each query, and of each key
    dlog_decay,  # [B,T,H]
    T, H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of each decay: of_queries − of_keys, summed from its token to the end of its segment."""
    row = tl.program_id(0).to(tl.int64)
    log_decay += row // H * T * H + row % H
    dlog_decay += row // H * T * H + row % H
    of_queries += row * T
    of_keys += row * T
    after = 0.0
    place = tl.arange(0, BLOCK)
    for block in tl.range(0, T, BLOCK):
        t = T - 1 - block - place  # from the last token to the first
        inside = t >= 0
        _, begins = load_decays(log_decay, positions, t, T, H)
        _, following = load_decays(log_decay, positions, t + 1, T, H)
        g = tl.load(of_queries + t, mask=inside, other=0.0) - tl.load(of_keys + t, mask=inside, other=0.0)
        g = tl.where((place == 0) & ~following, g + after, g)
        total, _ = tl.associative_scan((g, following.to(tl.int32)), 0, segmented)
        after = tl.sum(tl.where(place == BLOCK - 1, total, 0.0), 0)
        at = dlog_decay + t.to(tl.int64) * H
        tl.store(at, tl.where(begins, 0.0, total).to(dlog_decay.dtype.element_ty), mask=inside)
