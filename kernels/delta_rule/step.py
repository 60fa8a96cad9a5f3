"""One token of the delta rule, as in decoding."""

import torch
from torch import Tensor

from ..core.autocast import without_autocast
from ..core.recurrence import Recurrences
from ..linear_recurrence.reference import per_recurrence
from ..linear_recurrence.step import decayed, read, reused
from .reference import erase_and_value


def forward(a: Recurrences) -> tuple[Tensor, Tensor]:
    """o [B,1,H,V] and the next states [B,H·E,K,V], for T = 1 without packed documents."""
    with without_autocast(a.v.device):
        q, k, v = per_recurrence(a)
        erase, v = erase_and_value(a, k, v)
        before = erase[:, 0, :, None, :] @ a.first_state() if a.read_before else None  # before it may be overwritten
        S = decayed(a)
        for i in range(a.steps):
            seen = erase[:, i, :, None, :] @ S if i or before is None else before
            u = v[:, i] - seen[:, :, 0]
            S = torch.addcmul(S, k[:, i, :, :, None], u[:, :, None, :], out=reused(a, S))
        return read(a, q, S), S
