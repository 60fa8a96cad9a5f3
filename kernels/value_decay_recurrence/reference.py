"""The recurrence with a decay per value channel as a loop over time, easy to check against the paper by eye."""

import torch
from torch import Tensor

from ..core.recurrence import Recurrences, at_least_fp32
from ..linear_recurrence.reference import spans


def forward(a: Recurrences, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return o [B,T,H,V] and the final states [N,H,V,K]; `a.k` holds the values, and `a.v` the keys."""
    assert a.log_decay is not None
    q, k, v, log_decay = (at_least_fp32(x) for x in (q, a.v, a.k, a.log_decay))
    first, outputs, finals = a.first_state(), [], []
    for rows, start, stop in spans(a):
        S = first[rows]
        for t in range(start, stop):
            S = log_decay[:, t, :, :, None].exp() * S + v[:, t, :, :, None] * k[:, t, :, None, :]
            outputs.append(a.scale * (S * q[:, t, :, None, :]).sum(-1))
        finals.append(S)
    return torch.stack(outputs, 1), torch.cat(finals)
