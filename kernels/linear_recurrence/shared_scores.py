"""The chunkwise linear recurrence where decays are moderate: all value heads of a group share one matrix of scores.

With a reference point m, the decay between two tokens factors: exp(b_i − b_j) is exp(b_i − m) times exp(m − b_j). With
f = exp(b − m), w = exp(m), A = Q Kᵀ, and values u = β/f ⊙ V of all heads side by side [C,R·V]:

    O = f ⊙ (tril(A) u + Q (w S))      S ← e^{b_C}/w ((w S) + Kᵀ u)

No tensor is as large as one matrix of scores per head, which decays inside the scores would take. Tokens that m does
not serve have zeros in u and in O, and enter the state on their own, as values β e^{b_C − b} ⊙ V.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..core.autocast import without_autocast
from ..core.autograd import plain
from ..core.chunking import Chunking, Run, factors, scan
from ..core.recurrence import Recurrences


def serves(a: Recurrences, b: Tensor | None) -> bool:
    """Return whether this module can compute the call; b are the log decays summed inside chunks."""
    if a.subheads > 1 or not a.v.is_cpu or not plain((a.q, a.k, a.v)):  # the values of the decays must be known
        return False
    return b is None or b.dim() == 6


def forward(c: Chunking, beta: Tensor | None, b: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Outputs and final states.

    Args:
        c: The chunks.
        beta: β, [N,B,G,R,1,C].
        b: Log decays summed inside chunks, likewise.

    Returns:
        o [B,T,H,V], the final states [sequences,G,R,1,K,V], and [B,T,H,1]: True where o is not right; None if nowhere.
    """
    q, k, v = (c.by_group(x) for x in (c.a.q, c.a.k, c.a.v))
    heads = (1, 1, 1, c.a.repeats, 1, c.size)
    beta = v.new_ones(heads) if beta is None else beta
    b = v.new_zeros(heads) if b is None else b
    beta, b = (x.squeeze(4).transpose(0, 1).transpose(3, 4).unsqueeze(-1) for x in (beta, b))
    first = c.first_state().squeeze(3).transpose(2, 3)
    q = q if c.a.scale == 1 else q * c.a.scale
    o, S = _SharedScores.apply(q.squeeze(4), k.squeeze(4), v, beta, b, first, c.runs())
    o = c.join(o.transpose(2, 3).flatten(3, 4).transpose(0, 1)).to(c.a.v.dtype)
    beyond = factors(b, -3, v.dtype).beyond
    if beyond is None:
        return o, S.transpose(2, 3).unsqueeze(3), None
    beyond = beyond.expand(v.shape[0], v.shape[1], -1, -1, -1, -1)
    beyond = c.join(beyond.transpose(2, 3).flatten(3, 4).transpose(0, 1))
    return o, S.transpose(2, 3).unsqueeze(3), beyond


class _SharedScores(torch.autograd.Function):
    """q, k [B,N,G,C,K], v [B,N,G,C,R,V], β and b [B,N,G,C,R,1], S [sequences,G,K,R,V] → o and S."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, b: Tensor, first: Tensor, runs: list[Run]
    ) -> tuple[Tensor, Tensor]:
        A = q @ k.mT
        # a token's own value does not decay: kept separate, it cannot drown the others in the gradient of the decay
        own = A.diagonal(dim1=-2, dim2=-1).clone()[..., None, None]
        A.tril_(-1)
        f, f_inverse, w, after, rest = _decays(b, v)
        u = v * (beta * f_inverse)
        added = _wide(k.mT @ u.flatten(-2), v)
        apart = None if rest is None else _wide(k.mT @ (v * (beta * rest * (f == 0))).flatten(-2), v)
        start = torch.empty_like(added)

        def step(n: int, S: Tensor) -> Tensor:
            S = (torch.mul(w[:, n], S, out=start[:, n]) + added[:, n]).mul_(after[:, n])
            return S if apart is None else S.add_(apart[:, n])

        S = scan(runs, first, step)
        others = _wide((A @ u.flatten(-2)).add_(q @ start.flatten(-2)), v).mul_(f)
        ctx.save_for_backward(q, k, v, beta, b, A, own, u, start, others)
        ctx.runs = runs
        return torch.addcmul(others, v, beta * own), S

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, dS: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, beta, b, A, own, u, start, others = ctx.saved_tensors
        with without_autocast(v.device):
            f, f_inverse, w, after, rest = _decays(b, v)
            do = do.contiguous()
            d = (do * f).flatten(-2)
            added = _wide(q.mT @ d, v)
            dend = torch.empty_like(added)  # gradients of w S + Kᵀ u
            dafter = None if rest is None else torch.empty_like(added)  # and of the states after the chunks

            def step(n: int, dS: Tensor) -> Tensor:
                if dafter is not None:
                    dafter[:, n] = dS
                return (torch.mul(after[:, n], dS, out=dend[:, n]) + added[:, n]).mul_(w[:, n])

            dfirst = scan(ctx.runs, dS, step, back=True)
            through = (start * dend).sum((-3, -1), dtype=b.dtype)
            # what is added to the state, as values times β and a weight
            weight, into, dinto = f_inverse, u, dend
            if rest is not None and dafter is not None:
                weight, into, dinto = rest, v * (beta * rest), dafter
            u, start, into, dinto = (x.flatten(-2) for x in (u, start, into, dinto))
            of_scores, of_state = _wide(A.mT @ d, v), _wide(k @ dinto, v)
            down = (do * v).sum(-1, keepdim=True)
            along = (of_scores * v).sum(-1, keepdim=True, dtype=b.dtype) * f_inverse
            along_state = (of_state * v).sum(-1, keepdim=True, dtype=b.dtype) * weight
            dA = (d @ u.mT).tril_(-1)
            dA.diagonal(dim1=-2, dim2=-1).copy_((beta * down).sum((-2, -1)))
            dq, dk = (dA @ k).add_(d @ start.mT), (dA.mT @ q).add_(into @ dinto.mT)
            dv = of_scores.mul_(beta * f_inverse).addcmul_(of_state, beta * weight).addcmul_(do, beta * own)
            # the last token of a chunk enters the state without a decay: its part would only cancel
            entered = (beta * along_state)[..., :-1, :, :]
            db = (do * others).sum(-1, keepdim=True, dtype=b.dtype) - beta * along
            db[..., :-1, :, :] -= entered
            db[..., -1, :, 0] += through + entered.sum((-3, -1))
            dbeta = (along + along_state + own * down).to(v.dtype).sum_to_size(beta.shape)
            return dq, dk, dv, dbeta, db.sum_to_size(b.shape), dfirst, None


def _decays(b: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """f, 1/f, w, e^{b_C}/w and e^{b_C − b}, with axes [B,N,G,C,R,1].

    Where m does not serve a token, f and 1/f are 0. The last one is None where m serves all tokens.
    """
    f, last = factors(b, -3, v.dtype), b[..., -1:, :, :]
    m = f.reference * math.log(2)
    w, after = (x.to(v.dtype).expand(-1, v.shape[1], *[-1] * 4) for x in (f.reference.exp2(), (last - m).exp()))
    if f.beyond is None:
        return f.up, f.down, w, after, None
    served = ~f.beyond
    return f.up * served, f.down * served, w, after, (last - b).exp().to(v.dtype)


def _wide(x: Tensor, v: Tensor) -> Tensor:
    """[…,R·V] → […,R,V]."""
    return x.unflatten(-1, v.shape[-2:])
