"""Causal attention over all keys: PyTorch's scaled dot product attention, which picks its fastest kernel."""

import torch.nn.functional as F
from torch import Tensor

from .arguments import Attention


def serves(a: Attention) -> bool:
    """Return whether nothing but the future is masked."""
    unrestricted = a.documents is None and a.window_size is None and a.first_key is None
    return unrestricted and a.q.shape[1] == a.k.shape[1]


def forward(a: Attention) -> Tensor:
    """o [B,T,H,D]."""
    return dot_product(a, a.q, a.k, a.v, None, causal=True)


def dot_product(a: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
    """o [B,T,H,D] of q [B,T,H,D] and k, v [B,S,Hkv,D]; the mask broadcasts to [B,H,T,S], True where a key is seen."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    o = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=a.scale, enable_gqa=grouped)
    return o.transpose(1, 2)
