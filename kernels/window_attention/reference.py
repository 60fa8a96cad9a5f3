"""Causal softmax attention with a window, one query at a time, easy to check by eye."""

import torch
from torch import Tensor

from ..core.recurrence import at_least_fp32
from .arguments import Attention
from .decay import LEAST


def forward(a: Attention) -> Tensor:
    """o [B,T,H,V]."""
    B, T, H = a.q.shape[:3]
    offset = a.k.shape[1] - T
    q, k, v = at_least_fp32(a.q), at_least_fp32(a.k), at_least_fp32(a.v)
    k, v = k.repeat_interleave(H // k.shape[2], 2), v.repeat_interleave(H // v.shape[2], 2)
    starts = [start for start, stop in a.documents.spans for _ in range(start, stop)] if a.documents else [0] * T
    o = v.new_zeros(B, T, H, v.shape[3])
    decays = None if a.log_decay is None else at_least_fp32(a.log_decay)
    decays = None if decays is None else decays.masked_fill(decays.detach() < LEAST, -torch.inf)  # resets
    for row in range(B):
        for t in range(T):
            last = offset + t
            first = max(starts[t], last + 1 - a.window_size if a.window_size else 0)
            if a.first_key is not None:
                first = max(first, int(a.first_key[row]))
            if first > last:
                continue  # no valid key: 0
            scores = (q[row, t] * a.scale * k[row, first : last + 1]).sum(-1).T  # [H,S]
            if decays is not None:
                scores = scores + torch.stack([decays[row, s + 1 : last + 1].sum(0) for s in range(first, last + 1)], 1)
            o[row, t] = (scores.softmax(-1).T[:, :, None] * v[row, first : last + 1]).sum(0)
    return o.to(a.v.dtype)
