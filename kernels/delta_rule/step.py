"""One token of the (gated) delta rule, as in decoding."""

import torch
from torch import Tensor

from ..core.recurrence import Recurrences, at_least_fp32
from ..linear_recurrence.reference import per_recurrence
from ..linear_recurrence.step import decayed, read, reused


def forward(a: Recurrences) -> tuple[Tensor, Tensor]:
    """o [B,1,H,V] and the next states [B,H·E,K,V], for T = 1 without packed documents."""
    assert a.beta is not None
    with torch.autocast(a.v.device.type, enabled=False):
        S = decayed(a)
        q, k, v = per_recurrence(a)
        seen = (k[:, 0, :, None, :] @ S)[:, :, 0]
        u = at_least_fp32(a.beta)[:, 0, :, None] * (v[:, 0] - seen)
        S = torch.addcmul(S, k[:, 0, :, :, None], u[:, :, None, :], out=reused(a, S))
        return read(a, q, S), S
