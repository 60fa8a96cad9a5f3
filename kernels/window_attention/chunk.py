"""Window attention through PyTorch's scaled dot product attention: the CPU path, which serves every call.

A window shorter than the sequence is cut into blocks of queries, each against its own stretch of keys, so that the
work grows with T · window and not with T².
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..arguments import at_least_fp32
from .arguments import Attention
from .sdpa import dot_product

BLOCK = 64
SHORT = 256  # the longest window whose scores are kept


def forward(a: Attention) -> Tensor:
    """o [B,T,H,D]."""
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
        return dot_product(a, q, k, v, None, causal=True)
    query, key = torch.arange(S - T, S, device=q.device)[:, None], torch.arange(S, device=q.device)
    mask = key <= query
    if window is not None:
        mask = mask & (key > query - window)
    if first_key is None:
        return dot_product(a, q, k, v, mask)
    mask = mask & (key >= first_key[:, None, None])  # [B,T,S]
    # a row without a key is 0: softmax over nothing would be NaN
    some = mask.any(-1)
    o = dot_product(a, q, k, v, (mask | ~some[..., None])[:, None])
    return o.masked_fill(~some[:, :, None, None], 0)


def _blocks(a: Attention, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    T, before = q.shape[1], padded(window - 1)
    count = -(-T // BLOCK)
    q = F.pad(q, (0, 0, 0, 0, 0, count * BLOCK - T)).unflatten(1, (count, BLOCK))  # [B,N,BLOCK,H,D]
    k, v = _stretches(k, count, before), _stretches(v, count, before)  # [B,N,before+BLOCK,Hkv,D]
    query = torch.arange(BLOCK, device=q.device)[:, None] + before
    key = torch.arange(before + BLOCK, device=q.device)
    inside = (key <= query) & (key > query - window)
    real = key >= before - torch.arange(count, device=q.device)[:, None] * BLOCK  # padding before the first key
    mask = inside & real[:, None]  # [N,BLOCK,before+BLOCK]
    if window <= SHORT and not q.is_cuda:
        o = _products(a, q, k, v, mask)
    else:
        o = dot_product(a, q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), mask.repeat(len(q), 1, 1).unsqueeze(1))
    return o.reshape(-1, count * BLOCK, *o.shape[-2:])[:, :T]


def _stretches(x: Tensor, count: int, before: int) -> Tensor:
    """The keys of each block of queries, from n·BLOCK − before on: [B,T,heads,D] → [B,N,before+BLOCK,heads,D]."""
    # put together, not unfolded: the gradient of that is scattered element by element
    x = F.pad(x, (0, 0, 0, 0, before, count * BLOCK - x.shape[1])).unflatten(1, (-1, BLOCK))
    return torch.cat([x[:, n : n + count] for n in range(before // BLOCK + 1)], 2)


def _products(a: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """o [B,N,BLOCK,H,D]: two products around a softmax, which keeps the scores, but is faster on a processor."""
    with torch.autocast(q.device.type, enabled=False):
        groups = (k.shape[3], -1)
        q = (at_least_fp32(q) * a.scale).unflatten(3, groups).permute(0, 1, 3, 4, 2, 5).flatten(3, 4)
        k, kind, v = at_least_fp32(k).permute(0, 1, 3, 4, 2), v.dtype, at_least_fp32(v).transpose(2, 3)
        unseen = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, -torch.inf)
        scores = (q @ k).unflatten(3, (-1, BLOCK)) + unseen[:, None, None]  # [B,N,Hkv,R,BLOCK,before+BLOCK]
        o = torch.softmax(scores, -1).flatten(3, 4) @ v
        return o.unflatten(3, (-1, BLOCK)).flatten(2, 3).transpose(2, 3).to(kind)


def padded(keys: int) -> int:
    """`keys` rounded up to whole blocks."""
    return -(-keys // BLOCK) * BLOCK
