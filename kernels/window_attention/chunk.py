"""Window attention through PyTorch's scaled dot product attention, which serves every call.

With a window shorter than the sequence, queries are cut into blocks, each against the keys that it sees, so that the
work grows with T · window and not with T². So are queries after resets of log decays, for which each head needs a mask.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..core.autocast import without_autocast
from ..core.recurrence import at_least_fp32
from .arguments import Attention
from .decay import first_keys, may_reset, since, widened

BLOCK = 64
SHORT = 256  # the longest window whose scores are saved for backward
MASKED = 512  # queries per block where each head has a mask


def forward(a: Attention) -> Tensor:
    """o [B,T,H,V]."""
    if a.log_decay is not None:
        if a.documents is not None:
            spans = [slice(start, stop) for start, stop in a.documents.spans if stop > start]
            return torch.cat([forward(a.part(slice(None), span, span)) for span in spans], 1)
        with without_autocast(a.v.device):
            wide = widened(a)
            o = _after_resets(wide, first_keys(a.log_decay)) if may_reset(a) else forward(wide)
            return o[..., : a.v.shape[3]].to(a.v.dtype)
    if a.documents is None:
        return _attend(a, a.q, a.k, a.v, a.first_key)
    spans = [slice(start, stop) for start, stop in a.documents.spans if stop > start]
    return torch.cat([_attend(a, a.q[:, span], a.k[:, span], a.v[:, span], None) for span in spans], 1)


def _attend(a: Attention, q: Tensor, k: Tensor, v: Tensor, first_key: Tensor | None) -> Tensor:
    T, S = q.shape[1], k.shape[1]
    window = a.window_size if a.window_size and a.window_size < S else None
    if window is not None and T == S and first_key is None:
        return _blocks(a, q, k, v, window)
    if window is None and T == S and first_key is None:
        return _dot_product(a, q, k, v, None, causal=True)  # which picks its fastest kernel
    query, key = torch.arange(S - T, S, device=q.device)[:, None], torch.arange(S, device=q.device)
    mask = key <= query
    if window is not None:
        mask = mask & (key > query - window)
    if first_key is None:
        return _dot_product(a, q, k, v, mask)
    mask = mask & (key >= first_key[:, None, None])  # [B,T,S]
    # a row without a key is 0: softmax over nothing would be NaN
    some = mask.any(-1)
    o = _dot_product(a, q, k, v, (mask | ~some[..., None])[:, None])
    return o.masked_fill(~some[:, :, None, None], 0)


def _after_resets(a: Attention, first: Tensor) -> Tensor:
    """o [B,T,H,V], where queries see no key before the token in `first` [B,S,H].

    On a GPU, masks and scores are computed again in the backward pass, so that their memory stays that of one block.
    """
    T, S = a.q.shape[1], a.k.shape[1]
    recomputed = a.q.is_cuda and torch.is_grad_enabled()
    masked = partial(checkpoint, _masked, use_reentrant=False, preserve_rng_state=False) if recomputed else _masked
    first = first if a.first_key is None else first.maximum(a.first_key[:, None, None])
    blocks = []
    for i in range(S - T, S, MASKED):
        stop = min(S, i + MASKED)
        start = 0 if a.window_size is None else max(0, i + 1 - a.window_size)
        blocks.append(masked(a, slice(i, stop), slice(start, stop), first))
    return torch.cat(blocks, 1)


def _masked(a: Attention, queries: slice, keys: slice, first: Tensor) -> Tensor:
    """o [B,queries,H,V], where both slices count keys."""
    before = a.k.shape[1] - a.q.shape[1]
    q = a.q[:, queries.start - before : queries.stop - before]
    query = torch.arange(queries.start, queries.stop, device=q.device)[:, None]
    key = torch.arange(keys.start, keys.stop, device=q.device)
    mask = (key <= query) & (key >= first[:, queries].mT[..., None])  # [B,H,queries,keys]
    if a.window_size is not None:
        mask = mask & (key > query - a.window_size)
    if a.first_key is None:
        return _dot_product(a, q, a.k[:, keys], a.v[:, keys], mask)
    some = mask.any(-1, keepdim=True)  # a row without a key is 0: softmax over nothing would be NaN
    return _dot_product(a, q, a.k[:, keys], a.v[:, keys], mask | ~some).masked_fill(~some.transpose(1, 2), 0)


def _blocks(a: Attention, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    T, before = q.shape[1], padded(window - 1)
    count = -(-T // BLOCK)
    query = torch.arange(BLOCK, device=q.device)[:, None] + before
    key = torch.arange(before + BLOCK, device=q.device)
    inside = (key <= query) & (key > query - window)
    real = key >= before - torch.arange(count, device=q.device)[:, None] * BLOCK  # padding before the first key
    mask = inside & real[:, None]  # [N,BLOCK,before+BLOCK]
    if window <= SHORT and not q.is_cuda:
        return _products(a, q, k, v, mask)
    q = F.pad(q, (0, 0, 0, 0, 0, count * BLOCK - T)).unflatten(1, (count, BLOCK))  # [B,N,BLOCK,H,D]
    k, v = _stretches(k, mask), _stretches(v, mask)  # [B,N,before+BLOCK,Hkv,D]
    o = _dot_product(a, q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), mask.repeat(len(q), 1, 1).unsqueeze(1))
    return o.reshape(-1, count * BLOCK, *o.shape[-2:])[:, :T]


def _stretches(x: Tensor, mask: Tensor) -> Tensor:
    """x [B,T,…] → the keys of each block of queries [B,N,keys,…], for a mask [N,BLOCK,keys]."""
    count, before = len(mask), mask.shape[2] - BLOCK
    x = F.pad(x, [0, 0] * (x.dim() - 2) + [before, count * BLOCK - x.shape[1]]).unflatten(1, (-1, BLOCK))
    return _Overlapping.apply(x, count)


class _Overlapping(torch.autograd.Function):
    """Blocks [B,N+n,BLOCK,…] → [B,N,(n+1)·BLOCK,…], each with the next n. Autograd would fill zeros n + 1 times."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> Tensor:
        return torch.cat([x[:, n : n + count] for n in range(x.shape[1] - count + 1)], 2)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        parts = dy.split(BLOCK, 2)
        dx = F.pad(parts[0], [0, 0] * (dy.dim() - 2) + [0, len(parts) - 1])
        for n, part in enumerate(parts[1:], 1):
            dx[:, n : n + dy.shape[1]] += part
        return dx, None


def _products(a: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """o [B,T,H,D]: two products around a softmax, which saves the scores for backward, but is faster on a CPU."""
    with without_autocast(q.device):
        (B, T, _, _), heads = q.shape, k.shape[2]
        dtype, (count, _, keys) = v.dtype, mask.shape
        before, after = keys - BLOCK, count * BLOCK - T
        # heads first, so that products need no copies
        q = (at_least_fp32(q) * a.scale).transpose(1, 2)
        q = F.pad(q, (0, 0, 0, after)) if after else q
        q = q.unflatten(1, (heads, -1)).unflatten(3, (-1, BLOCK)).transpose(2, 3).flatten(3, 4)  # [B,Hkv,N,R·BLOCK,D]
        k, v = (F.pad(at_least_fp32(x).transpose(1, 2), (0, 0, before, after)).flatten(0, 1) for x in (k, v))
        k, v = (_Overlapping.apply(x.unflatten(1, (-1, BLOCK)), count).unflatten(0, (B, heads)) for x in (k, v))
        unseen = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, -torch.inf)
        scores = (q @ k.mT).add_(unseen.repeat(1, q.shape[3] // BLOCK, 1))  # [B,Hkv,N,R·BLOCK,before+BLOCK]
        o = (torch.softmax(scores, -1) @ v).unflatten(3, (-1, BLOCK))
        return o.permute(0, 2, 4, 1, 3, 5).flatten(3, 4).flatten(1, 2)[:, :T].to(dtype)


def _dot_product(a: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
    """o [B,T,H,D] of q [B,T,H,D] and k, v [B,S,Hkv,D]; the mask broadcasts to [B,H,T,S], True where a key is seen."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    o = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=a.scale, enable_gqa=grouped)
    return o.transpose(1, 2)


def one_query(a: Attention) -> bool:
    """Return whether there is one query per row."""
    return a.q.shape[1] == 1 and a.documents is None


def step(a: Attention) -> Tensor:
    """o [B,1,H,V]; the query heads that share keys become queries of one head."""
    k, v, first, decay = a.k, a.v, a.first_key, a.log_decay
    if a.window_size is not None:
        before = k.shape[1] - a.window_size
        k, v = k[:, before:], v[:, before:]
        first = None if first is None else first - before
        decay = None if decay is None else decay[:, before:]
    S, shared = k.shape[1], k.shape[2]
    q, k, v = a.q[:, 0].unflatten(1, (shared, -1)), k.transpose(1, 2), v.transpose(1, 2)
    mask = None
    if first is not None:
        # the last key is always seen: softmax over nothing would be NaN
        seen = torch.arange(S, device=k.device) >= first.clamp(max=S - 1)[:, None]
        mask = seen[:, None, None]
    if decay is None:
        o = F.scaled_dot_product_attention(q, k, v, mask, scale=a.scale)
    else:
        bias = since(decay).mT.unflatten(1, (shared, -1))  # [B,Hkv,R,S]
        o = _biased(q, k, v, bias if mask is None else bias.masked_fill(~mask, -torch.inf), a.scale)
    o = o.flatten(1, 2)[:, None]
    return o if first is None else o.masked_fill((first >= S)[:, None, None, None], 0)


def _biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    """o [B,H,T,V] of scores in at least fp32 with a bias [B,H,T,S].

    PyTorch's fused kernel reads some biases from misaligned addresses, which ends the process (PyTorch 2.11, H100).
    """
    with without_autocast(q.device):
        scores = (at_least_fp32(q) * scale) @ at_least_fp32(k).mT + bias
        return (torch.softmax(scores, -1) @ at_least_fp32(v)).to(v.dtype)


def padded(keys: int) -> int:
    """`keys` rounded up to whole blocks."""
    return -(-keys // BLOCK) * BLOCK
