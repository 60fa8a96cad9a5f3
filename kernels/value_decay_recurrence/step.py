"""One token of the recurrence with a decay per value channel, as in decoding."""

import torch
from torch import Tensor

from ..core.autocast import without_autocast
from ..core.recurrence import Recurrences, at_least_fp32
from ..linear_recurrence.step import decayed, reused


def forward(a: Recurrences, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return o [B,1,H,V] and the next states [B,H,V,K], for T = 1 without packed documents."""
    with without_autocast(a.v.device):
        S, k, v = decayed(a), at_least_fp32(a.v)[:, 0], at_least_fp32(a.k)[:, 0]
        S = torch.addcmul(S, v[..., None], k[..., None, :], out=reused(a, S))
        o = S @ (at_least_fp32(q)[:, 0] * a.scale)[..., None]
        return o.squeeze(-1).unsqueeze(1), S
