"""The (gated) delta rule chunk by chunk in plain PyTorch: the CPU path.

With b the log decays summed inside a chunk, D_ij = exp(b_i − b_j) for j ≤ i and N the strict lower part of D ⊙ K Kᵀ,
one triangular system decouples the tokens of a chunk (the WY form of arXiv 2412.06464, section 3):

    (I + βN) U = β (V − e^b K S)
    O = e^b ⊙ (Q S) + (Q Kᵀ ⊙ D) U         S ← e^{b_C} S + (e^{b_C − b} K)ᵀ U

Keys and queries are stacked, so that one product serves both: with L = [βD; D] ⊙ [K; Q] Kᵀ and
R = [βe^b; e^b] ⊙ [K; Q], the first two lines become U + L₀ U = βV − R₀ S and O = R₁ S + L₁ U.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..core.autocast import without_autocast
from ..core.chunking import CHUNK, Chunking, Run, causal_decay, scan, scan_stacked
from ..core.deterministic import is_deterministic
from ..core.recurrence import Recurrences

MANY = 16  # heads, over all sequences, from which a step outweighs its overhead: shorter chunks then do less work
# the largest triangle that is inverted by solving; larger ones are inverted by products. oneDNN computes batches of
# products of 8 × 8 by the number of matrices, so there are none in deterministic mode.
SOLVED, SOLVED_DETERMINISTIC = 8, 16


def forward(a: Recurrences) -> tuple[Tensor, Tensor]:
    """o [B,T,H,V] and the final states [N,H·E,K,V]."""
    assert a.beta is not None
    with without_autocast(a.v.device):
        c = Chunking(a, CHUNK if is_deterministic() or a.v.shape[0] * a.v.shape[2] < MANY else CHUNK // 2)
        kq, v, b = torch.cat([c.keys(a.k), c.keys(a.q) * a.scale], -2), c.values(a.v), c.log_decay()
        if b is None:
            b = v.new_zeros(1, 1, 1, a.repeats, 1, c.size)
        o, S = _Chunks.apply(kq, v, c.gates(a.beta), b, c.first_state(), c.runs())
        return c.outputs(o), S.flatten(1, 3)


class _Chunks(torch.autograd.Function):
    """kq [N,B,G,E,2C,K], v [N,B,G,R,C,V], β and b [N,B,G,R,E,C], S₀ [sequences,G,R,E,K,V] → o, shaped as v, and S."""

    @staticmethod
    def forward(
        ctx: Any, kq: Tensor, v: Tensor, beta: Tensor, b: Tensor, first: Tensor, runs: list[Run]
    ) -> tuple[Tensor, Tensor]:
        C = v.shape[-2]
        products = _halves(kq @ kq[..., :C, :].mT)  # [N,B,G,1,E,2,C,C]
        D, (shrink, fade, decay) = causal_decay(b, v.dtype).unsqueeze(-3), _decays(b, kq)
        L, R = products * D, _halves(kq) * shrink
        for x in (L, R):
            x[..., 0, :, :].mul_(beta[..., None])
        inverse, R = unit_lower_inverse(L[..., 0, :, :]), R.flatten(-3, -2)
        decayed_k = kq[..., :C, :].unsqueeze(3) * fade
        written = v.unsqueeze(4) * beta[..., None]
        U, seen = (written.new_empty(*x.shape[:-1], v.shape[-1]) for x in (written, R))
        old, read = seen.split(C, -2)
        fading = decay.expand(*written.shape[:5], 1, 1)
        chunks = [each_chunk(x) for x in (R, inverse, decayed_k.mT, fading, written, U, seen, old)]

        def step(n: int, S: Tensor) -> Tensor:
            R, inverse, decayed_k, decay, written, U, seen, old = (x[n] for x in chunks)
            torch.bmm(R, S, out=seen)
            torch.bmm(inverse, written.sub_(old), out=U)
            return torch.addcmul(torch.bmm(decayed_k, U), decay, S)

        before, S = scan_stacked(flat_runs(runs, first), first.flatten(0, 3), step)
        before = before.unflatten(1, U.shape[1:5])
        o = _summed((L[..., 1, :, :] @ U).add_(read), 4)
        ctx.save_for_backward(kq, v, beta, b, products, L, R, D, inverse, U, before)
        ctx.runs = runs
        return o, S.view(first.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, dS: Tensor) -> tuple[Tensor | None, ...]:
        kq, v, beta, b, products, L, R, D, inverse, U, before = ctx.saved_tensors
        with without_autocast(v.device):
            C = v.shape[-2]
            k, beta = kq[..., :C, :], beta[..., None]
            shrink, fade, decay = _decays(b, kq)
            decayed_k, do = k.unsqueeze(3) * fade, do.unsqueeze(4)
            # gradients of [−β(V − …); O], from which those of both halves of L and of R follow
            Z = U.new_empty(*U.shape[:-2], 2, C, U.shape[-1])
            Z[..., 1, :, :] = do
            dU, both = L[..., 1, :, :].mT @ do, Z.flatten(-3, -2)
            fading = decay.expand(*U.shape[:5], 1, 1)
            chunks = [each_chunk(x) for x in (R.mT, -inverse.mT, decayed_k, fading, dU, Z[..., 0, :, :], both)]
            after: list[Tensor] = []

            def step(n: int, dS: Tensor) -> Tensor:
                R, inverse, decayed_k, decay, dU, left, both = (x[n] for x in chunks)
                after.append(dS)
                left.copy_(torch.bmm(inverse, dU.add_(torch.bmm(decayed_k, dS))))
                return torch.addcmul(torch.bmm(R, both), decay, dS)

            dfirst = scan(flat_runs(ctx.runs, dS), dS.flatten(0, 3), step, back=True).view(dS.shape)
            dlater = torch.stack(after[::-1]).unflatten(1, U.shape[1:5])
            dL, dR = _split(both @ U.mT) * D, _split(both @ before.mT) * shrink
            dL[..., 0, :, :].diagonal(dim1=-2, dim2=-1).zero_()
            # b_i adds to its row and subtracts from its column: the diagonal cancels, and would drown small gradients
            moved = dL * products
            moved[..., 1, :, :].diagonal(dim1=-2, dim2=-1).zero_()
            read = (dR * _halves(kq)).sum(-1, dtype=b.dtype)  # [N,B,G,R,E,2,C]
            dbeta = moved[..., 0, :, :].sum(-1) + read[..., 0, :] - (Z[..., 0, :, :] * v.unsqueeze(4)).sum(-1)
            for x in (dL, dR, moved):
                x[..., 0, :, :].mul_(beta)
            d_decayed_k = (U @ dlater.mT) * fade
            faded = (d_decayed_k * k.unsqueeze(3)).sum(-1, dtype=b.dtype)
            # the terms that cancel are the same numbers, summed in fp64
            db = moved.sum((-3, -1), dtype=b.dtype) - moved.sum((-3, -2), dtype=b.dtype)
            db += beta[..., 0] * read[..., 0, :] + read[..., 1, :] - faded
            db[..., -1] += faded.sum(-1) + ((before * dlater).sum((-2, -1)) * decay[..., 0, 0])

            dL = _summed(dL, 3).flatten(-3, -2)
            dkq = _summed(dR, 3).flatten(-3, -2) + dL @ k
            dkq[..., :C, :] += _summed(d_decayed_k, 3) + dL.mT @ kq
            dv = _summed(Z[..., 0, :, :] * -beta, 4)
            return dkq, dv, dbeta.to(v.dtype), db.sum_to_size(b.shape), dfirst, None


def _decays(b: Tensor, kq: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """e^b [N,B,G,R,E,1,C,1], e^{b_C − b} [N,B,G,R,E,C,1], and e^{b_C} [N,B,G,R,E,1,1]; N … E are 1 where b's are."""
    shrink, fade = b.to(kq.dtype).exp(), (b[..., -1:] - b).to(kq.dtype).exp()
    return shrink[..., None, :, None], fade[..., None], shrink[..., -1:, None]


def each_chunk(x: Tensor) -> tuple[Tensor, ...]:
    """[N,B,G,R,E,X,Y] → one [B·G·R·E,X,Y] per chunk, as batched products take it without broadcasting."""
    return x.flatten(1, 4).unbind()


def flat_runs(runs: list[Run], states: Tensor) -> list[Run]:
    """The runs as slices of the states flattened from [sequences,G,R,E,K,V] to [sequences·G·R·E,K,V]."""
    count = states.shape[1:4].numel()
    return [(slice(*(None if i is None else i * count for i in (r.start, r.stop))), chunks) for r, chunks in runs]


def _halves(x: Tensor) -> Tensor:
    """[N,B,G,E,2C,X] → [N,B,G,1,E,2,C,X]."""
    return _split(x).unsqueeze(3)


def _split(x: Tensor) -> Tensor:
    """[…,2C,X] → […,2,C,X]."""
    return x.unflatten(-2, (2, -1))


def _summed(x: Tensor, dim: int) -> Tensor:
    """x.sum(dim), without a copy if that axis has size 1."""
    return x.squeeze(dim) if x.shape[dim] == 1 else x.sum(dim)


def unit_lower_inverse(x: Tensor) -> Tensor:
    """The inverse of I + the strict lower part of x [...,C,C]; the rest of x is not read.

    Both diagonal halves are inverted together, recursively; the block below them is a product. It is as accurate as
    solving row by row, and several times faster on a CPU.
    """
    C = x.shape[-1]
    if (SOLVED_DETERMINISTIC if is_deterministic() else SOLVED) >= C or C % 2:
        one = torch.eye(C, dtype=x.dtype, device=x.device).expand(x.shape)
        return torch.linalg.solve_triangular(x, one, upper=False, unitriangular=True)
    h = C // 2
    upper, lower = unit_lower_inverse(torch.stack([x[..., :h, :h], x[..., h:, h:]])).unbind()
    inverse = x.new_zeros(x.shape)
    inverse[..., :h, :h], inverse[..., h:, h:] = upper, lower
    inverse[..., h:, :h] = -(lower @ (x[..., h:, :h] @ upper))
    return inverse
