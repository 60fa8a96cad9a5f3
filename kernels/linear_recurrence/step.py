"""One token of the linear recurrence, as in decoding."""

import torch
from torch import Tensor

from ..core.autocast import without_autocast
from ..core.recurrence import Recurrences, at_least_fp32
from .reference import per_recurrence


def forward(a: Recurrences) -> tuple[Tensor, Tensor]:
    """o [B,1,H,V] and the next states [B,H·E,K,V], for T = 1 without packed documents."""
    with without_autocast(a.v.device):
        S, v, beta = decayed(a), at_least_fp32(a.v)[:, 0].repeat_interleave(a.subheads, 1), a.beta
        q, k, _ = per_recurrence(a)
        if beta is not None:
            v = v * at_least_fp32(beta)[:, 0, :, None]
        S = torch.addcmul(S, k[:, 0, :, :, None], v[:, :, None, :], out=reused(a, S))
        return read(a, q, S), S


def decayed(a: Recurrences) -> Tensor:
    """The initial state after the decay of this step."""
    S, g = a.first_state(), a.log_decay
    if g is None:
        return S
    g = at_least_fp32(g).exp()
    g = g[:, None, None] if g.dim() == 1 else g[:, 0, :, None, None] if g.dim() == 3 else g[:, 0, :, :, None]
    return torch.mul(S, g, out=reused(a, S))


def reused(a: Recurrences, S: Tensor) -> Tensor | None:
    """The state itself if the next one may overwrite it, else None."""
    return S if a.consume_state else None


def read(a: Recurrences, q: Tensor, S: Tensor) -> Tensor:
    """The outputs of all recurrences, summed over the subheads of a head."""
    B, _, H, V = a.v.shape
    o = (q[:, 0, :, None, :] @ S).view(B, H, a.subheads, V).sum(2)
    return o.unsqueeze(1).to(a.v.dtype)
