"""Window attention in deterministic mode: blocks of 64 queries, each against all keys that it may see, in PyTorch.

The shapes of a block's products follow from its place in its sequence alone. So a row equals the row alone, and a call
with a cache of a multiple of 64 keys equals the call without. On a GPU the products have fixed tiles, since the
library's choice for a batch of products depends on their number, and scores are computed again in the backward pass.
"""

from functools import partial
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..core.autocast import without_autocast
from ..core.backend import same_backend
from ..core.expansion import expanded
from ..core.recurrence import at_least_fp32
from ..linear.tiles import implementation, tiled_products
from .arguments import Attention
from .chunk import BLOCK, padded
from .decay import first_keys, summed


def forward(a: Attention) -> Tensor:
    """o [B,T,H,V]."""
    with without_autocast(a.v.device):
        if a.documents is not None:
            spans = [slice(start, stop) for start, stop in a.documents.spans if stop > start]
            return torch.cat([_rows(a.part(slice(None), span, span)) for span in spans], 1)
        if a.first_key is None or not len(a.q):
            return _rows(a)
        first = [max(0, start) for start in a.first_key.tolist()]
        rows = sorted(range(len(first)), key=first.__getitem__)
        alike = [(start, [*each]) for start, each in groupby(rows, key=first.__getitem__)]
        parts = [_from(a, each, start) for start, each in alike]
        if len(parts) == 1:
            return parts[0]
        places = torch.tensor(rows, dtype=torch.int64, device=a.q.device).argsort()
        return torch.cat(parts)[places]


def _from(a: Attention, rows: list[int], first: int) -> Tensor:
    """o [R,T,H,V] of rows that have the same first valid key; 0 for queries before it."""
    T, S = a.q.shape[1], a.k.shape[1]
    skipped = max(0, first - (S - T))
    if skipped >= T:
        return a.v.new_zeros(len(rows), T, a.q.shape[2], a.v.shape[3])
    some = slice(None) if len(rows) == len(a.q) else rows
    o = _rows(a.part(some, slice(skipped, T), slice(first, S)))
    return F.pad(o, (0, 0, 0, 0, skipped, 0))


def _rows(a: Attention) -> Tensor:
    """o [B,T,H,V], where all keys are valid."""
    first = None if a.log_decay is None else first_keys(a.log_decay)[:, -a.q.shape[1] :]
    total = None if a.log_decay is None else summed(a).transpose(1, 2)  # the sums begin with the first valid key
    return _scores(a, first, total)


def _scores(a: Attention, first: Tensor | None, total: Tensor | None) -> Tensor:
    """o [B,T,H,V], from the first key [B,T,H] that each query sees, and sums [B,H,S] of the log decays."""
    q, k, v = a.q, a.k, a.v
    (_, T, H, _), S, heads, dtype = q.shape, k.shape[1], k.shape[2], v.dtype
    count, seen = -(-T // BLOCK), S - T
    before = None if a.window_size is None else padded(a.window_size - 1)
    # a block has its shape wherever it is cut out: a full cache lacks the keys that whole blocks have in front
    ahead = 0 if before is None or seen + 1 != a.window_size else before - seen
    after = count * BLOCK - T
    how = implementation(q)
    scored = partial(_scored, how)
    if (how == "triton" or q.is_cuda) and torch.is_grad_enabled():
        scored = partial(checkpoint, scored, use_reentrant=False, context_fn=same_backend)
    q = F.pad((at_least_fp32(q) * a.scale).transpose(1, 2), (0, 0, 0, after)).unflatten(1, (heads, -1))
    V = v.shape[3]
    v = F.pad(v, (0, 1)) if V == 1 else v  # a product with one column is another routine, which depends on the batch
    k, v = (F.pad(at_least_fp32(x).transpose(1, 2), (0, 0, ahead, after)) for x in (k, v))
    total = None if total is None else F.pad(total, (ahead, after)).unflatten(1, (heads, -1))  # [B,Hkv,R,S]
    outputs = []
    for n in range(count):
        stop = ahead + seen + (n + 1) * BLOCK
        start = 0 if before is None else max(0, stop - BLOCK - before)
        key = torch.arange(start - ahead, stop - ahead, device=q.device)
        query = torch.arange(seen + n * BLOCK, seen + (n + 1) * BLOCK, device=q.device)[:, None]
        hidden = (key > query) | (key < 0)
        if a.window_size is not None:
            hidden |= key <= query - a.window_size
        hidden = hidden.repeat(H // heads, 1)
        if first is not None:
            seen_from = F.pad(first[:, n * BLOCK : (n + 1) * BLOCK], (0, 0, 0, max(0, (n + 1) * BLOCK - T)))
            seen_from = seen_from.mT.unflatten(1, (heads, -1)).flatten(2, 3)  # [B,Hkv,R·BLOCK]
            hidden = hidden | (key < seen_from[..., None])
        block = q[..., n * BLOCK : (n + 1) * BLOCK, :].flatten(2, 3)  # [B,Hkv,R·BLOCK,D]
        sums = () if total is None else (total[..., stop - BLOCK : stop], total[..., start:stop])
        o = scored(block, k[:, :, start:stop], v[:, :, start:stop], hidden, *sums)
        outputs.append(o.unflatten(2, (-1, BLOCK)))
    return torch.cat(outputs, 3).flatten(1, 2)[:, :, :T, :V].transpose(1, 2).to(dtype)


def _scored(how: str, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, *sums: Tensor) -> Tensor:
    """o [B,Hkv,R·BLOCK,V]; `sums` of the log decays are those of the queries [B,Hkv,R,BLOCK] and keys [B,Hkv,R,S]."""
    scores = _times(q, k.mT, how)
    if sums:
        of_queries, of_keys = sums[0][..., None], sums[1][..., None, :]
        pairs = torch.broadcast_shapes(of_queries.shape, of_keys.shape)
        between = expanded(of_queries, pairs) - expanded(of_keys, pairs)
        scores = scores + between.to(scores.dtype).flatten(2, 3)
    return _times(torch.softmax(scores.masked_fill(hidden, -torch.inf), -1), v, how)


def _times(a: Tensor, b: Tensor, how: str) -> Tensor:
    """a [B,H,M,K] times b [B,H,K,N]."""
    if how == "torch" and not a.is_cuda:
        return a @ b
    product: Tensor = tiled_products(a.flatten(0, 1), b.flatten(0, 1), how)
    return product.unflatten(0, a.shape[:2])
