"""Window attention through PyTorch's scaled dot product attention: the CPU path, which serves every call.

A window shorter than the sequence is cut into blocks of queries, each against its own stretch of keys, so that the
work grows with T · window and not with T².
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .arguments import Attention
from .sdpa import dot_product

BLOCK = 64


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
    B, T = q.shape[:2]
    count, before = -(-T // BLOCK), padded(window - 1)
    q = F.pad(q, (0, 0, 0, 0, 0, count * BLOCK - T)).unflatten(1, (count, BLOCK)).flatten(0, 1)
    # block n of queries sees the keys from n·BLOCK − before on
    k, v = (
        F.pad(x, (0, 0, 0, 0, before, count * BLOCK - T)).unfold(1, before + BLOCK, BLOCK).movedim(-1, 2).flatten(0, 1)
        for x in (k, v)
    )
    query = torch.arange(BLOCK, device=q.device)[:, None] + before
    key = torch.arange(before + BLOCK, device=q.device)
    inside = (key <= query) & (key > query - window)
    real = key >= before - torch.arange(count, device=q.device)[:, None] * BLOCK  # padding before the first key
    mask = (inside & real[:, None]).repeat(B, 1, 1).unsqueeze(1)
    return dot_product(a, q, k, v, mask).unflatten(0, (B, count)).flatten(1, 2)[:, :T]


def padded(keys: int) -> int:
    """`keys` rounded up to whole blocks."""
    return -(-keys // BLOCK) * BLOCK
