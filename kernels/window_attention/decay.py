"""Attention whose scores decay: the sums of log decays as channels of queries and keys, or as a bias of one query.

A score gets F_i − F_j, where F sums the log decays up to a token. Kernels in fp32 add it by further channels: queries
hold F_i and 1, keys hold 1 and −F_j, once for each query head that shares the key. F grows with the length, and a large
F would cost the score digits. So F is split into an integer and a remainder of at most ½. The integers come first:
where channels are added in order, their difference is exact, and small for the keys that matter. F is summed in fp64.

F_i cancels in the softmax, but in the gradient of the decays its rounding errors cancel those of −F_j.

A reset hides all earlier keys. Scores are not bounded, so no finite number can do that: resets are left out of F, and
each query has a first key that it sees, the token of the last reset (`first_keys`).
"""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..core.autograd import plain
from ..core.deterministic import is_deterministic
from ..core.recurrence import at_least_fp32
from ..core.resets import cumulated, sums
from .arguments import Attention

UNIT = 8  # channels: fused kernels on a GPU need multiples
LEAST = -1e4  # log decays below it are resets; in sums they would cost the digits of the others


def may_reset(a: Attention) -> bool:
    """Return whether a token after the first may be a reset; without values on the host to look at, assume so."""
    decays = a.log_decay
    if decays is None or decays.is_meta or decays[:, 1:].numel() == 0:
        return False
    return not (decays.is_cpu and plain((decays,))) or bool(decays.detach()[:, 1:].amin() < LEAST)


def first_keys(log_decay: Tensor) -> Tensor:
    """Index of the first key [B,S,H] that each token sees, the token of the last reset; 0 before any reset."""
    token = torch.arange(log_decay.shape[1], device=log_decay.device)[:, None]
    return torch.where(log_decay.detach() < LEAST, token, 0).cummax(1).values


def summed(a: Attention) -> Tensor:
    """F [B,S,H] in fp64: sums of the log decays after the first token of each row or document, without resets."""
    assert a.log_decay is not None
    decays = at_least_fp32(a.log_decay)
    spans = [(0, decays.shape[1])] if a.documents is None else a.documents.spans
    reset = may_reset(a)
    return torch.cat([_summed(decays[:, i:j], reset) for i, j in spans if j > i], 1)


def _summed(decays: Tensor, may_reset: bool) -> Tensor:
    """Sums [B,T,H] that leave the first token out: no score depends on its decay, so its gradient is exactly 0."""
    decays = decays[:, 1:]
    resets = decays.detach() < LEAST if may_reset else None
    decays = decays if resets is None else decays.masked_fill(resets, 0)
    total = sums(decays, 1, torch.float64, least=LEAST) if resets is None else _Sums.apply(decays, resets)
    return F.pad(total, (0, 0, 1, 0))


class _Sums(torch.autograd.Function):
    """Sums [B,T,H] along time whose gradients end at resets: what later tokens contribute only cancels."""

    @staticmethod
    def forward(ctx: Any, decays: Tensor, resets: Tensor) -> Tensor:
        ctx.save_for_backward(resets)
        ctx.dtype, ctx.mode = decays.dtype, is_deterministic()  # the backward pass on a GPU runs in another thread
        return sums(decays, 1, torch.float64, least=LEAST)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (resets,) = ctx.saved_tensors
        size = gradient.shape[1]
        to_end = F.pad(cumulated(gradient.flip(1), 1, ctx.mode).flip(1), (0, 0, 0, 1))
        token = torch.arange(size, device=gradient.device)[:, None]
        resets = F.pad(torch.where(resets, token, size), (0, 0, 0, 1), value=size)
        following = resets.flip(1).cummin(1).values.flip(1)[:, 1:]  # the first reset after each token
        return (to_end[:, :-1] - to_end.gather(1, following)).to(ctx.dtype), None


def widened(a: Attention) -> Attention:
    """The call without log decays, in at least fp32, with further channels; those of its output are 0."""
    shared = a.k.shape[2]
    repeats = a.q.shape[2] // shared
    q, k, v = at_least_fp32(a.q) * a.scale, at_least_fp32(a.k), at_least_fp32(a.v)
    total = summed(a)
    integers = total.detach().round()
    first = integers[:, -q.shape[1] :][:, :1]  # of the first query: not all libraries add the channels in order
    one_hot = torch.eye(repeats, dtype=q.dtype, device=q.device).repeat(shared, 1).expand(*q.shape[:3], repeats)
    ones = torch.ones_like(k[..., :1])
    # of queries, and of keys for each query head that shares them
    (integers_i, integers_j), (rest_i, rest_j) = (
        (x[:, -q.shape[1] :, :, None], -x.unflatten(2, (shared, repeats)))
        for x in ((integers - first).to(q.dtype), (total - integers).to(q.dtype))
    )
    q = torch.cat([integers_i, one_hot, q, one_hot, rest_i], -1)
    k = torch.cat([ones, integers_j, k, rest_j, ones], -1)
    if a.q.is_cuda:
        q, k = (F.pad(x, (0, -x.shape[3] % UNIT)) for x in (q, k))
    v = F.pad(v, (0, max(0, k.shape[3] - v.shape[3])))  # equal sizes are what the fused kernels are for
    return dataclasses.replace(a, q=q, k=k, v=v, scale=1.0, log_decay=None)


def since(log_decay: Tensor) -> Tensor:
    """Sums of the log decays after each key, up to the last one: [B,S,H] → [B,S,H], in at least fp32.

    They are −∞ for keys before a reset, and no difference of sums is taken.
    """
    decays = at_least_fp32(log_decay[:, 1:].flip(1))
    decays = decays.masked_fill(decays.detach() < LEAST, -torch.inf)
    return F.pad(decays.cumsum(1).flip(1), (0, 0, 0, 1))
