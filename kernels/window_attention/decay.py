"""Attention whose scores decay: the sums of log decays as channels of the keys, or as a bias of one query.

Softmax over the keys of a query leaves out what all of them share. So of F_i − F_j, where F sums the log decays up to a
token, kernels in fp32 only need −F_j (in bf16, `flex.py` needs both). It becomes further channels of k, one for each
query head that shares it, and the queries of a head have 1 in one of them and 0 in the others. The scores are computed
in fp32, because F grows with the length.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.recurrence import at_least_fp32
from ..core.resets import sums
from .arguments import Attention

UNIT = 8  # channels: fused kernels on a GPU need multiples


def summed(a: Attention) -> Tensor:
    """F [B,S,H] in at least fp32: sums of the log decays after the first token of each row or document, inclusive."""
    assert a.log_decay is not None
    decays = at_least_fp32(a.log_decay)
    spans = [(0, decays.shape[1])] if a.documents is None else a.documents.spans
    return torch.cat([_summed(decays[:, i:j]) for i, j in spans if j > i], 1)


def _summed(decays: Tensor) -> Tensor:
    """Sums [B,T,H] that leave the first token out: no score depends on its decay, so its gradient is exactly 0."""
    return F.pad(sums(decays[:, 1:], 1, decays.dtype), (0, 0, 1, 0))


def widened(a: Attention) -> Attention:
    """The call without log decays, in at least fp32, with further channels; those of its output are 0."""
    shared = a.k.shape[2]
    repeats = a.q.shape[2] // shared
    extra = -(-repeats // UNIT) * UNIT if a.q.is_cuda else repeats
    q, k, v = at_least_fp32(a.q) * a.scale, at_least_fp32(a.k), at_least_fp32(a.v)
    own = torch.eye(repeats, extra, dtype=q.dtype, device=q.device).repeat(shared, 1)
    q = torch.cat([q, own.expand(*q.shape[:3], extra)], -1)
    k = torch.cat([k, F.pad(-summed(a).unflatten(2, (shared, repeats)), (0, extra - repeats))], -1)
    v = F.pad(v, (0, max(0, k.shape[3] - v.shape[3])))  # equal sizes are what the fused kernels are for
    return dataclasses.replace(a, q=q, k=k, v=v, scale=1.0, log_decay=None)


def since(log_decay: Tensor) -> Tensor:
    """Sums of the log decays after each key, up to the last one: [B,S,H] → [B,S,H], in at least fp32."""
    decays = at_least_fp32(log_decay[:, 1:].flip(1))
    return F.pad(sums(decays, 1, decays.dtype).flip(1), (0, 0, 0, 1))
