"""The chunkwise linear recurrence where decays are moderate: all value heads of a group share one matrix of scores.

With m = b_C/2, half the decay of a chunk, the decay between two tokens factors: exp(b_i − b_j) is exp(b_i − m)
times exp(m − b_j). With f = exp(b − m), w = exp(m), A = Q Kᵀ, and values u = β/f ⊙ V of all heads side by side [C,R·V]:

    O = f ⊙ (tril(A) u + Q (w S))      S ← w ((w S) + Kᵀ u)

No tensor is as large as one matrix of scores per head, which decays inside the scores would take.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..core.autograd import plain
from ..core.chunking import Chunking, Run, scan
from ..core.recurrence import Recurrences

# the factors stay within exp(±half of this), and their products with other numbers below exp(88), the limit of fp32
RANGE = 120.0


def serves(a: Recurrences, b: Tensor | None) -> bool:
    """Return whether this module can compute the call; b are the log decays summed inside chunks."""
    if a.subheads > 1 or not a.v.is_cpu or not plain((a.q, a.k, a.v)):  # the values of the decays must be known
        return False
    if b is None or b.dim() != 6:
        return b is None
    return not b.numel() or float(b.detach().abs().max()) <= RANGE


def forward(c: Chunking, beta: Tensor | None, b: Tensor | None) -> tuple[Tensor, Tensor]:
    """β and b [N,B,G,R,1,C] → o [B,T,H,V] and S [sequences,G,R,1,K,V]."""
    q, k, v = (c.by_group(x) for x in (c.a.q, c.a.k, c.a.v))
    heads = (1, 1, 1, c.a.repeats, 1, c.size)
    beta = v.new_ones(heads) if beta is None else beta
    b = v.new_zeros(heads) if b is None else b
    beta, b = (x.squeeze(4).transpose(0, 1).transpose(3, 4).unsqueeze(-1) for x in (beta, b))
    first = c.first_state().squeeze(3).transpose(2, 3)
    q = q if c.a.scale == 1 else q * c.a.scale
    o, S = _SharedScores.apply(q.squeeze(4), k.squeeze(4), v, beta, b, first, c.runs())
    o = c.join(o.transpose(2, 3).flatten(3, 4).transpose(0, 1)).to(c.a.v.dtype)
    return o, S.transpose(2, 3).unsqueeze(3)


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
        f, f_inverse, w = _factors(b, v)
        u = v * (beta * f_inverse)
        added = _wide(k.mT @ u.flatten(-2), v)
        start, after = torch.empty_like(added), []

        def step(n: int, S: Tensor) -> Tensor:
            after.append((torch.mul(w[:, n], S, out=start[:, n]) + added[:, n]).mul_(w[:, n]))
            return after[n]

        S = scan(runs, first, step)
        others = _wide((A @ u.flatten(-2)).add_(q @ start.flatten(-2)), v).mul_(f)
        ctx.save_for_backward(q, k, v, beta, b, A, own, u, start, others, *after)
        ctx.runs = runs
        return torch.addcmul(others, v, beta * own), S

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, dS: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, beta, b, A, own, u, start, others, *after = ctx.saved_tensors
        with torch.autocast(v.device.type, enabled=False):
            f, f_inverse, w = _factors(b, v)
            do = do.contiguous()
            d = (do * f).flatten(-2)
            added = _wide(q.mT @ d, v)
            dend, carried = torch.empty_like(added), f.new_empty(*added.shape[:3], v.shape[4])

            def step(n: int, dS: Tensor) -> Tensor:
                carried[:, n] = (after[n] * dS).sum((-3, -1))
                return (torch.mul(w[:, n], dS, out=dend[:, n]) + added[:, n]).mul_(w[:, n])

            dfirst = scan(ctx.runs, dS, step, back=True)
            dend, u, start = dend.flatten(-2), u.flatten(-2), start.flatten(-2)
            du = _wide((A.mT @ d).add_(k @ dend), v)
            down = (do * v).sum(-1, keepdim=True)
            along = (du * v).sum(-1, keepdim=True, dtype=b.dtype) * f_inverse
            dA = (d @ u.mT).tril_(-1)
            dA.diagonal(dim1=-2, dim2=-1).copy_((beta * down).sum((-2, -1)))
            dq, dk = (dA @ k).add_(d @ start.mT), (dA.mT @ q).add_(u @ dend.mT)
            dv = (du * (beta * f_inverse)).addcmul_(do, beta * own)
            db = (do * others).sum(-1, keepdim=True, dtype=b.dtype) - beta * along
            db[..., -1, :, 0] += carried
            dbeta = (along + own * down).to(v.dtype).sum_to_size(beta.shape)
            return dq, dk, dv, dbeta, db.sum_to_size(b.shape), dfirst, None


def _factors(b: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """exp(b − m), exp(m − b) [B,N,G,C,R,1], and exp(m) for each chunk [B,N,G,1,R,1]."""
    m = b[..., -1:, :, :] / 2
    factors = (b - m).exp(), (m - b).exp(), m.exp().expand(-1, v.shape[1], *[-1] * 4)
    f, f_inverse, w = (x.to(v.dtype) for x in factors)
    return f, f_inverse, w


def _wide(x: Tensor, v: Tensor) -> Tensor:
    """[…,R·V] → […,R,V]."""
    return x.unflatten(-1, v.shape[-2:])
