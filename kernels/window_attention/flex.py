"""FlexAttention: a fused kernel that skips blocks of scores in which no query sees a key."""

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.documents import Documents
from .arguments import Attention

BLOCK = 128  # queries and keys per block


def serves(a: Attention) -> bool:
    """Return whether all tokens are new, the head sizes are powers of two, at least 16, and nothing decays."""
    fitting = all(size >= 16 and size & (size - 1) == 0 for size in (a.q.shape[3], a.v.shape[3]))
    return fitting and a.log_decay is None and a.first_key is None and a.q.shape[1] == a.k.shape[1]


def forward(a: Attention) -> Tensor:
    """o [B,T,H,V]."""
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = (x.transpose(1, 2) for x in (a.q, a.k, a.v))
    grouped = q.shape[1] != k.shape[1]
    # uncompiled, FlexAttention has all scores in memory; code that is being compiled compiles it as well
    attention = _compiled() if q.is_cuda and not torch.compiler.is_compiling() else flex_attention
    o = attention(q, k, v, block_mask=mask(a), scale=a.scale, enable_gqa=grouped)
    return o.transpose(1, 2)


@cache
def _compiled() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def mask(a: Attention) -> Any:
    """The cached `BlockMask` of a call; it is the same for all rows and heads."""
    if a.documents is None:
        return _of_row(a.q.shape[1], a.window_size, a.q.device)
    return a.documents.tables(_of_documents, a.window_size).mask


class _MaskOfDocuments(NamedTuple):
    """A `BlockMask`, and the first key that each query sees [T], which it reads."""

    mask: Any
    first: Tensor

    def tensors(self) -> Sequence[Tensor]:
        """All tensors of the mask."""
        return [*(x for x in self.mask.as_tuple() if isinstance(x, Tensor)), self.first]


def _of_documents(packed: Documents, window: int | None) -> _MaskOfDocuments:
    with torch.inference_mode(False):  # the cached mask may serve the next training step
        token = torch.arange(packed.length, device=packed.device)
        first = _first_keys(token - packed.positions, window)
        return _MaskOfDocuments(_mask(first), first)


@lru_cache(maxsize=8)
def _of_row(length: int, window: int | None, device: torch.device) -> Any:
    with torch.inference_mode(False):
        return _mask(_first_keys(torch.zeros(length, dtype=torch.int64, device=device), window))


def _first_keys(document: Tensor, window: int | None) -> Tensor:
    """The first key that each query sees [T], for tokens whose documents start at `document` [T]; none decreases."""
    if window is None:
        return document
    T = len(document)
    return torch.maximum(document, torch.arange(1 - window, T + 1 - window, device=document.device))


def _mask(first: Tensor) -> Any:
    """The mask for the first key that each query sees [T]."""
    from torch.nn.attention.flex_attention import BlockMask

    T = len(first)
    start = torch.arange(0, T, BLOCK, device=first.device)  # of each block, of queries or of keys
    last = (start + BLOCK).clamp(max=T) - 1
    # together, the queries of a block see everything from the first key of its first query to its last query
    some = (last >= first[start][:, None]) & (start <= last[:, None])
    every = (start >= first[last][:, None]) & (last <= start[:, None])
    every &= (start + BLOCK <= T)[:, None]  # a last block that is not full needs the mask at its end

    def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= first[query])

    listed = (*_listed(some & ~every), *_listed(every))
    return BlockMask.from_kv_blocks(*listed, BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=(T, T))


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each block of queries the number of key blocks it sees, and all indices, those first; both [1,1,…]."""
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1).to(torch.int32)[None, None], order.to(torch.int32)[None, None]
