"""The linear recurrence as a loop over time, easy to check against the papers by eye."""

import torch
from torch import Tensor

from ..core.recurrence import Recurrences, at_least_fp32


def per_recurrence(a: Recurrences) -> tuple[Tensor, Tensor, Tensor]:
    """q (scaled) [B,T,H·E,K], k [B,nT,H·E,K] and v [B,nT,H·E,V], repeated to one head per recurrence."""
    G, R, E = a.groups, a.repeats, a.subheads

    def wide(x: Tensor) -> Tensor:
        return at_least_fp32(x).unflatten(2, (G, 1, E)).expand(-1, -1, G, R, E, -1).flatten(2, 4)

    return wide(a.q) * a.scale, wide(a.k), at_least_fp32(a.v).repeat_interleave(E, 2)


def per_step_decay(a: Recurrences) -> Tensor | None:
    """exp(log_decay) as [B,T,H·E,1 or K], at least fp32."""
    if a.log_decay is None:
        return None
    g = at_least_fp32(a.log_decay)
    if g.dim() == 1:
        g = g.expand(*a.q.shape[:2], -1)
    return (g.unsqueeze(-1) if g.dim() == 3 else g).exp()


def spans(a: Recurrences) -> list[tuple[slice, int, int]]:
    """Rows of the state and the span of time, for each document (or once for the whole batch)."""
    if a.documents is None:
        return [(slice(None), 0, a.length)]
    return [(slice(n, n + 1), start, stop) for n, (start, stop) in enumerate(a.documents.spans)]


def forward(a: Recurrences) -> tuple[Tensor, Tensor]:
    """o [B,T,H,V] and the final states [N,H·E,K,V]."""
    q, k, v = per_recurrence(a)
    decay, first = per_step_decay(a), a.first_state()
    B, _, H, V = a.v.shape
    outputs, finals = [], []
    for rows, start, stop in spans(a):
        S = first[rows]
        for t in range(start, stop):
            if decay is not None:
                S = decay[:, t, :, :, None] * S
            u = v[:, t] if a.beta is None else at_least_fp32(a.beta[:, t, :, None]) * v[:, t]
            S = S + k[:, t, :, :, None] * u[:, :, None, :]
            o = (q[:, t, :, :, None] * S).sum(-2)
            outputs.append(o.view(B, H, a.subheads, V).sum(2))
        finals.append(S)
    return torch.stack(outputs, 1).to(a.v.dtype), torch.cat(finals)
