"""The delta rule as a loop over time, easy to check against the papers by eye."""

import torch
from torch import Tensor

from ..core.recurrence import Recurrences, at_least_fp32
from ..linear_recurrence.reference import per_recurrence, per_step_decay, spans


def erase_and_value(a: Recurrences, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The erase keys and values of all recurrences, from their keys and values, times β if there is one."""
    erase = k if a.erase is None else at_least_fp32(a.erase)
    if a.beta is None:
        return erase, v
    beta = at_least_fp32(a.beta)
    return (beta * erase, v) if beta.dim() == 4 else (beta.unsqueeze(-1) * erase, beta.unsqueeze(-1) * v)


def forward(a: Recurrences) -> tuple[Tensor, Tensor]:
    """o [B,T,H,V] and the final states [N,H·E,K,V]."""
    q, k, v = per_recurrence(a)
    erase, v = erase_and_value(a, k, v)
    decay, first = per_step_decay(a), a.first_state()
    outputs, finals = [], []
    for rows, start, stop in spans(a):
        S = first[rows]
        for t in range(start, stop):
            before = S
            if decay is not None:
                S = decay[:, t, :, :, None] * S
            read = before if a.read_before else S
            for i in range(t * a.steps, (t + 1) * a.steps):
                seen = (erase[:, i, :, :, None] * read).sum(-2)  # the value that the state holds for this key
                S = read = S + k[:, i, :, :, None] * (v[:, i] - seen)[:, :, None, :]
            o = (q[:, t, :, :, None] * S).sum(-2)
            outputs.append(o.unflatten(1, (-1, a.subheads)).sum(2))
        finals.append(S)
    return torch.stack(outputs, 1).to(a.v.dtype), torch.cat(finals)
