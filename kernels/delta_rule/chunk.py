"""The (gated) delta rule chunk by chunk in plain PyTorch, with autograd: the CPU path.

With b the log decays summed inside a chunk, D_ij = exp(b_i − b_j) for j ≤ i and N the strict lower part of D ⊙ K Kᵀ,
the tokens of a chunk are untangled by one triangular solve (the WY form of arXiv 2412.06464, section 3):

    [W, U₀] = (I + βN)⁻¹ β [e^b K, V]      U = U₀ − W S
    O = e^b ⊙ (Q S) + (Q Kᵀ ⊙ D) U         S ← e^{b_C} S + (e^{b_C − b} K)ᵀ U
"""

import torch
from torch import Tensor

from ..arguments import Recurrences
from ..chunking import Chunking, causal_decay


def forward(a: Recurrences) -> tuple[Tensor, Tensor]:
    """o [B,T,H,V] and the final states [N,H·E,K,V]."""
    assert a.beta is not None
    with torch.autocast(a.v.device.type, enabled=False):
        c = Chunking(a)
        q, k, v = c.keys(a.q) * a.scale, c.keys(a.k), c.values(a.v)
        beta, b = c.gates(a.beta).unsqueeze(-1), c.log_decay()  # [B,N,G,R,E,C,1]
        K, V = q.shape[-1], v.shape[-1]

        overlap, scores = (k @ k.mT).unsqueeze(3), (q @ k.mT).unsqueeze(3)  # [B,N,G,1,E,C,C]
        keys = k.unsqueeze(3)
        written, kept, reading = beta * keys, keys, q.unsqueeze(3)
        if b is None:
            scores = scores.tril()
        else:
            D, shrink = causal_decay(b, v.dtype), b.to(v.dtype).exp().unsqueeze(-1)
            overlap, scores = overlap * D, scores * D
            written, reading = written * shrink, reading * shrink
            kept = keys * (b[..., -1:] - b).to(v.dtype).exp().unsqueeze(-1)
        # only the strict lower part is read, and the diagonal is taken as one
        right = torch.cat([written, beta * v.unsqueeze(4)], -1)
        W, U = torch.linalg.solve_triangular(beta * overlap, right, upper=False, unitriangular=True).split([K, V], -1)

        # unbound, not indexed: the gradient of an index is a tensor of the full size, for each chunk
        W_n, U_n, kept_n = W.unbind(1), U.unbind(1), kept.expand(*W.shape).mT.unbind(1)
        decay_n = None
        if b is not None:
            decay_n = b[..., -1].to(v.dtype).exp()[..., None, None].expand(-1, c.count, *[-1] * 5).unbind(1)
        updates: list[Tensor] = []

        def step(n: int, S: Tensor) -> Tensor:
            updates.append(U_n[n] - W_n[n] @ S)
            return (S if decay_n is None else decay_n[n] * S) + kept_n[n] @ updates[n]

        before, S = c.scan(step)
        # subheads are summed inside the products, by laying them side by side along the contracted axis
        scores, reading = scores.expand(*W.shape[:-1], -1), reading.expand(*W.shape)
        o = _side_by_side(scores) @ torch.stack(updates, 1).flatten(4, 5)
        o = o + _side_by_side(reading) @ before.flatten(4, 5)
        return c.outputs(o), S


def _side_by_side(x: Tensor) -> Tensor:
    """[B,N,G,R,E,C,X] → [B,N,G,R,C,E·X]."""
    return x.transpose(4, 5).flatten(5, 6)
