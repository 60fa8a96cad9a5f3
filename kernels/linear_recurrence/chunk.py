"""The linear recurrence chunk by chunk in plain PyTorch, with autograd: the CPU path where scores are not shared.

With b the log decays summed inside a chunk and D_ij = exp(b_i − b_j), j ≤ i:

    P = (Q Kᵀ ⊙ D) diag(β)      O = P V + e^b ⊙ (Q S)      S ← e^{b_C} S + (β e^{b_C − b} K)ᵀ V

Keys are never repeated for the value heads of a group, nor values for the subheads of a head: gates are applied to
scores, values and outputs instead. A decay per key channel has to be applied to q and k themselves.

Where one reference point serves the decays of a chunk (`factors`), D is not needed. Rows that it does not serve are
computed with D. Decays per channel come by halves (`core/pair_decays.py`). No bit of an output depends on later tokens.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..core.autocast import without_autocast
from ..core.chunking import Chunking, causal_decay, scan_stacked
from ..core.expansion import expanded
from ..core.pair_decays import PairDecays
from ..core.recurrence import Recurrences
from . import shared_scores


def forward(a: Recurrences) -> tuple[Tensor, Tensor]:
    """o [B,T,H,V] and the final states [N,H·E,K,V]."""
    with without_autocast(a.v.device):
        c = Chunking(a)
        beta, b = None if a.beta is None else c.gates(a.beta), c.log_decay()
        if shared_scores.serves(a, b):
            o, S, beyond = shared_scores.forward(c, beta, b)
            return o if beyond is None else _corrected(c, o, beyond, beta, b), S.flatten(1, 3)
        q, k = c.keys(a.q) * a.scale, c.keys(a.k)
        if b is not None and b.dim() == 7:
            o, S = _per_channel(c, q, k, c.values(a.v), beta, b)
        else:
            o, S = _per_head(c, q, k, c.values(a.v), beta, b)
        return c.outputs(o), S.flatten(1, 3)


def _corrected(c: Chunking, o: Tensor, beyond: Tensor, beta: Tensor | None, b: Tensor | None) -> Tensor:
    """o [B,T,H,V] with right numbers where `beyond` [B,T,H,1] is True; nothing is left of the state there."""
    o, beyond = (x.unflatten(2, (c.a.groups, -1)) for x in (o, beyond))  # [B,T,G,R,·]
    heads = beyond.any(0).any(0).any(0).flatten().nonzero().flatten()  # of any group

    def of_heads(x: Tensor | None) -> Tensor | None:
        return x if x is None or x.shape[3] == 1 else x.index_select(3, heads)

    scores = _scores(c.keys(c.a.q) * c.a.scale, c.keys(c.a.k), of_heads(beta), of_heads(b))
    exact = scores @ c.values(c.a.v).index_select(3, heads)
    exact = c.join(exact.permute(0, 1, 4, 2, 3, 5)).to(o.dtype)
    exact = torch.where(beyond.index_select(3, heads), exact, o.index_select(3, heads))
    return o.index_copy(3, heads, exact).flatten(2, 3)


def _per_head(
    c: Chunking, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, b: Tensor | None
) -> tuple[Tensor, Tensor]:
    o = _scores(q, k, beta, b) @ v  # [N,B,G,R,C,V]

    weight = beta
    if b is not None:
        rest = (expanded(b[..., -1:], b.shape) - b).to(v.dtype).exp()
        weight = rest if beta is None else rest * beta
    values = v.unsqueeze(4) if weight is None else v.unsqueeze(4) * weight.unsqueeze(-1)  # [N,B,G,R,E|1,C,V]
    added = torch.einsum("nbgeck,nbgrecv->nbgrekv", k, values.expand(-1, -1, -1, -1, k.shape[3], -1, -1))
    if b is None:
        new = added.unbind()
        before, S = scan_stacked(c.runs(), c.first_state(), lambda n, S: S + new[n])
        return o + torch.einsum("nbgeck,nbgrekv->nbgrcv", q, before), S
    decay = expanded(b[..., -1].to(v.dtype).exp()[..., None, None].expand(c.count, *[-1] * 6), added.shape)
    new, decays = added.unbind(), decay.unbind()
    before, S = scan_stacked(c.runs(), c.first_state(), lambda n, S: decays[n] * S + new[n])
    read = torch.einsum("nbgeck,nbgrekv->nbgrecv", q, before)
    return o + (read * b.to(v.dtype).exp().unsqueeze(-1)).sum(4), S


def _scores(q: Tensor, k: Tensor, beta: Tensor | None, b: Tensor | None) -> Tensor:
    """P, summed over subheads: [N,B,G,R,C,C]."""
    scores = (q @ k.mT).unsqueeze(3)  # [N,B,G,1,E,C,C]
    scores = scores.tril() if b is None else scores * causal_decay(b, q.dtype)
    return (scores if beta is None else scores * beta.unsqueeze(-2)).sum(4)


def _per_channel(c: Chunking, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, b: Tensor) -> tuple[Tensor, Tensor]:
    q, k = q.unsqueeze(3), k.unsqueeze(3)  # [N,B,G,1,E,C,K]
    scores = ChannelScores.apply(q, k, b)
    own = (q * k).sum(-1)  # a token's own value does not decay: apart, it cannot disturb the gradient of the decay
    last = b[..., -1:, :]
    decayed_k = k * (last - b).to(v.dtype).exp()
    if beta is not None:
        scores, own, decayed_k = scores * beta.unsqueeze(-2), own * beta, decayed_k * beta.unsqueeze(-1)
    added = decayed_k.mT @ v.unsqueeze(4)  # [N,B,G,R,E,K,V]
    new, decays = added.unbind(), expanded(last.to(v.dtype).exp().mT.expand(c.count, *[-1] * 6), added.shape).unbind()
    before, S = scan_stacked(c.runs(), c.first_state(), lambda n, S: decays[n] * S + new[n])
    read = (q * b.to(v.dtype).exp()) @ before
    return scores.sum(4) @ v + own.sum(4).unsqueeze(-1) * v + read.sum(4), S


class ChannelScores(torch.autograd.Function):
    """A_ij = Σ_k q_ik k_jk exp(b_ik − b_jk) for j < i, else 0: q, k, b [...,C,K] → [...,C,C]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, b)
        decays = PairDecays(b, 1, q.dtype)
        return decays.products(q, k, b, decays.token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dA: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, b = ctx.saved_tensors
        decays = PairDecays(b, 1, q.dtype)
        dq, dk = decays.gradients(dA, q, k, b, decays.token)
        db = (q * dq).to(b.dtype) - (k * dk).to(b.dtype)
        return dq.sum_to_size(q.shape), dk.sum_to_size(k.shape), db.sum_to_size(b.shape)
