"""One query per row against a cache, as in decoding."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .arguments import Attention


def serves(a: Attention) -> bool:
    return a.q.shape[1] == 1 and a.documents is None


def forward(a: Attention) -> Tensor:
    """o [B,1,H,D]; the query heads that share keys become queries of one head."""
    k, v, first = a.k, a.v, a.first_key
    if a.window_size is not None:
        before = k.shape[1] - a.window_size
        k, v = k[:, before:], v[:, before:]
        first = None if first is None else first - before
    S, shared = k.shape[1], k.shape[2]
    q, k, v = a.q[:, 0].unflatten(1, (shared, -1)), k.transpose(1, 2), v.transpose(1, 2)
    mask = None
    if first is not None:
        # the last key is always seen: softmax over nothing would be NaN
        seen = torch.arange(S, device=k.device) >= first.clamp(max=S - 1)[:, None]
        mask = seen[:, None, None]
    o = F.scaled_dot_product_attention(q, k, v, mask, scale=a.scale).flatten(1, 2)[:, None]
    return o if first is None else o.masked_fill((first >= S)[:, None, None, None], 0)
