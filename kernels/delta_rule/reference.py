"""The (gated) delta rule as a loop over time, easy to check against the papers by eye."""

import torch
from torch import Tensor

from ..core.recurrence import Recurrences, at_least_fp32
from ..linear_recurrence.reference import per_recurrence, per_step_decay, spans


def forward(a: Recurrences) -> tuple[Tensor, Tensor]:
    """o [B,T,H,V] and the final states [N,H·E,K,V]."""
    assert a.beta is not None
    q, k, v = per_recurrence(a)
    decay, first, beta = per_step_decay(a), a.first_state(), at_least_fp32(a.beta)
    B, _, H, V = a.v.shape
    outputs, finals = [], []
    for rows, start, stop in spans(a):
        S = first[rows]
        for t in range(start, stop):
            if decay is not None:
                S = decay[:, t, :, :, None] * S
            seen = (k[:, t, :, :, None] * S).sum(-2)  # the value that the state holds for this key
            u = beta[:, t, :, None] * (v[:, t] - seen)
            S = S + k[:, t, :, :, None] * u[:, :, None, :]
            o = (q[:, t, :, :, None] * S).sum(-2)
            outputs.append(o.view(B, H, a.subheads, V).sum(2))
        finals.append(S)
    return torch.stack(outputs, 1).to(a.v.dtype), torch.cat(finals)
