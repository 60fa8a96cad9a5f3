"""The delta rule chunk by chunk in plain PyTorch, with erase keys of their own, decays per channel, several steps.

With b the log decays summed inside a chunk, r = b (or the sums before each token's own decay, if the erase key reads
the state before it decays), and rows that are the steps of tokens (`core/pair_decays.py`):

    L_ij = Σ_c a_ic k_jc exp(r_ic − b_jc), j < i      P_ij = Σ_c q_ic k_jc exp(b_ic − b_jc), j ≤ i
    Ã = a e^r      Q̃ = q e^b      K̂ = k e^{b_C − b}      U = (I + L)⁻¹ (V − Ã S)
    O = Q̃ S + P U                 S ← e^{b_C} S + K̂ᵀ U

Every recurrence is computed for itself. Where the erase keys are multiples of the keys and there is one decay per head,
`chunk.py` shares the products of keys instead.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.autocast import without_autocast
from ..core.autograd import once
from ..core.chunking import CHUNK, Chunking, Run, scan, scan_stacked
from ..core.deterministic import is_deterministic
from ..core.pair_decays import PairDecays
from ..core.recurrence import Recurrences, at_least_fp32
from .chunk import each_chunk, flat_runs, unit_lower_inverse


def forward(a: Recurrences) -> tuple[Tensor, Tensor]:
    """o [B,T,H,V] and the final states [N,H·E,K,V]."""
    with without_autocast(a.v.device):
        size = max(1, CHUNK // a.steps)
        # in deterministic mode, a chunk also ends where decoding continues, which is at multiples of CHUNK tokens
        c = Chunking(a, 1 << size.bit_length() - 1 if is_deterministic() else size)
        G, R, E = a.groups, a.repeats, a.subheads
        k, v = _rows(c, a.k, G, 1, E), _rows(c, a.v, G, R, 1)
        erase = k if a.erase is None else _rows(c, a.erase, G, R, E)
        if a.beta is not None:
            per_channel = a.beta.dim() == 4
            beta = _rows(c, a.beta if per_channel else a.beta.unsqueeze(-1), G, R, E)
            erase, v = beta * erase, v if per_channel else beta * v
        b = c.log_decay()
        if b is None:
            b = k.new_zeros(1, 1, 1, R, E, c.size)
        b = b if b.dim() == 7 else b.unsqueeze(-1)
        q = c.keys(a.q).unsqueeze(3) * a.scale
        o, S = _Chunks.apply(q, k, erase, v, b, c.first_state(), c.runs(), a.steps, a.read_before)
        return c.outputs(o), S.flatten(1, 3)


def _rows(c: Chunking, x: Tensor, *heads: int) -> Tensor:
    """[B,nT,heads,X] → [N,B,…,nC,X], with the heads on three axes."""
    x = c.split(at_least_fp32(x).unflatten(1, (c.length, c.a.steps))).unflatten(4, heads)
    return x.permute(0, 1, 4, 5, 6, 2, 3, 7).flatten(5, 6).contiguous()


class _Factors:
    """Factors of a chunk's products with the state and its gradient, from b [N,B,G,R,E,C,K|1], the sums of log decays.

    Attributes:
        reads: The sums that erase keys read with [N,B,G,R,E,nC,K|1].
        q: Q̃ [N,B,G,R,E,C,K].
        a: Ã [N,B,G,R,E,nC,K].
        k: K̂, shaped as Ã.
        whole: e^{b_C} [N,B,G,R,E,K|1,1].
    """

    def __init__(self, q: Tensor, k: Tensor, a: Tensor, b: Tensor, decays: PairDecays, *, read_before: bool):
        self.reads = decays.b
        if read_before:
            self.reads = self.reads.clone()
            self.reads[..., :: decays.steps, :] = F.pad(b[..., :-1, :], (0, 0, 1, 0))
        dtype = q.dtype
        self.of_q, self.of_a = b.to(dtype).exp(), self.reads.to(dtype).exp()
        self.of_k = (b[..., -1:, :] - decays.b).to(dtype).exp()
        self.q, self.a, self.k = q * self.of_q, a * self.of_a, k * self.of_k
        self.whole = self.of_q[..., -1:, :].mT


class _Chunks(torch.autograd.Function):
    """q [N,B,G,1,E,C,K], k [N,B,G,1,E,nC,K], a [N,B,G,R,E,nC,K], v [N,B,G,R,E|1,nC,V], b and S₀ [sequences,G,R,E,K,V]
    → o [N,B,G,R,C,V] and S.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        a: Tensor,
        v: Tensor,
        b: Tensor,
        first: Tensor,
        runs: list[Run],
        steps: int,
        read_before: bool,
    ) -> tuple[Tensor, Tensor]:
        decays = PairDecays(b, steps, q.dtype)
        f = _Factors(q, k, a, b, decays, read_before=read_before)
        token, C = decays.token[::steps], q.shape[-2]
        P, L = decays.products(q, k, b, token), decays.products(a, k, f.reads, decays.token)
        _within(P, 1, steps).copy_((q.unsqueeze(-2) * k.unflatten(-2, (C, steps))).sum(-1).mT.unsqueeze(-3))
        if steps > 1:
            own = a.unflatten(-2, (C, steps)) @ k.unflatten(-2, (C, steps)).mT
            _within(L, steps, steps).copy_(own.tril(-1).movedim(-3, -1))
        inverse = unit_lower_inverse(L)
        U = a.new_empty(*a.shape[:-1], v.shape[-1])
        chunks = [each_chunk(x) for x in (f.a, inverse, f.k.mT, _wide(f.whole, a), v.expand(U.shape), U)]

        def step(n: int, S: Tensor) -> Tensor:
            a, inverse, k, whole, v, U = (x[n] for x in chunks)
            torch.bmm(inverse, torch.baddbmm(v, a, S, alpha=-1), out=U)
            return torch.addcmul(torch.bmm(k, U), whole, S)

        before, S = scan_stacked(flat_runs(runs, first), first.flatten(0, 3), step)
        before = before.unflatten(1, U.shape[1:5])
        o = (P @ U).add_(f.q @ before).sum(4)
        ctx.save_for_backward(q, k, a, v, b, P, inverse, U, before)
        ctx.runs, ctx.steps, ctx.read_before = runs, steps, read_before
        return o, S.view(first.shape)

    @staticmethod
    @once
    def backward(ctx: Any, do: Tensor, dS: Tensor) -> tuple[Tensor | None, ...]:
        q, k, a, v, b, P, inverse, U, before = ctx.saved_tensors
        with without_autocast(q.device):
            decays = PairDecays(b, ctx.steps, q.dtype)
            f = _Factors(q, k, a, b, decays, read_before=ctx.read_before)
            do = do.unsqueeze(4)
            dU, dR, dread = P.mT @ do, torch.empty_like(U), f.q.mT @ do
            chunks = [each_chunk(x) for x in (f.a.mT, inverse.mT, f.k, _wide(f.whole, a), dU, dR, dread)]
            after: list[Tensor] = []

            def step(n: int, dS: Tensor) -> Tensor:
                a, inverse, k, whole, dU, dR, dread = (x[n] for x in chunks)
                after.append(dS)
                torch.bmm(inverse, torch.baddbmm(dU, k, dS), out=dR)
                return torch.addcmul(torch.baddbmm(dread, a, dR, alpha=-1), whole, dS)

            dfirst = scan(flat_runs(ctx.runs, dS), dS.flatten(0, 3), step, back=True).view(dS.shape)
            dlater = torch.stack(after[::-1]).unflatten(1, U.shape[1:5])
            dq, dk, da, db = _chunk_gradients(
                *(q, k, a, b, decays, f),
                *(do @ U.mT, -dR @ U.mT),
                _StateTerms(
                    (do @ before.mT) * f.of_q,
                    (-dR @ before.mT) * f.of_a,
                    (U @ dlater.mT) * f.of_k,
                    (before * dlater).sum(-1, keepdim=True) * f.whole,
                ),
                ctx.read_before,
            )
            shapes = (q.shape, k.shape, a.shape, v.shape, b.shape)
            return (*(x.sum_to_size(s) for x, s in zip((dq, dk, da, dR, db), shapes, strict=True)), dfirst, *[None] * 3)


class _StateTerms(NamedTuple):
    """Terms that the states before and after a chunk add to its gradients.

    Attributes:
        q: To the gradient of q.
        a: To the gradient of a.
        k: To the gradient of k.
        whole: To the gradient of b_C, per channel [...,K,1].
    """

    q: Tensor
    a: Tensor
    k: Tensor
    whole: Tensor


def _chunk_gradients(
    q: Tensor,
    k: Tensor,
    a: Tensor,
    b: Tensor,
    decays: PairDecays,
    f: _Factors,
    dP: Tensor,
    dL: Tensor,
    states: _StateTerms,
    read_before: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, a and b, for every recurrence.

    Args:
        q: As for `_Chunks`, like k, a, b and `read_before`.
        k: Keys.
        a: Erase keys.
        b: Sums of log decays.
        decays: The decays between tokens.
        f: Factors of the chunk.
        dP: Gradient of P, on and below the diagonal.
        dL: Gradient of L, below the diagonal.
        states: Terms of the states.
    """
    n, C, wide = decays.steps, q.shape[-2], b.dtype
    rq, rk = decays.gradients(dP, q, k, b, decays.token[::n])
    ra, rk_a = decays.gradients(dL, a, k, f.reads, decays.token)
    rq, ra, rk = rq + states.q, ra + states.a, rk + rk_a
    # of the decays: the terms that cancel are the same numbers, summed in fp64
    fading = _to_size(k * states.k, b, wide)
    db = _to_size(q * rq, b, wide) - (_to_size(k * rk, b, wide) + fading).unflatten(-2, (C, n)).sum(-2)
    erased = _to_size(a * ra, b, wide).unflatten(-2, (C, n))
    if read_before:
        db[..., :-1, :] += erased[..., 1:, 0, :]
        erased[..., 0, :] = 0
    db += erased.sum(-2)
    db[..., -1:, :] += fading.sum(-2, keepdim=True) + _to_size(states.whole.mT, b, wide)
    # pairs inside a token
    own_P = _within(dP, 1, n).squeeze(-3).mT.unsqueeze(-2)  # [...,C,1,n]
    rows_k = k.unflatten(-2, (C, n))
    dq = rq + (own_P @ rows_k).squeeze(-2)
    dk, da = rk + states.k + (own_P.mT * q.unsqueeze(-2)).flatten(-3, -2), ra
    if n > 1:
        own_L = _within(dL, n, n).movedim(-1, -3).tril(-1)
        da = da + (own_L @ rows_k).flatten(-3, -2)
        dk = dk + (own_L.mT @ a.unflatten(-2, (C, n))).flatten(-3, -2)
    return dq, dk, da, db


def _within(A: Tensor, rows: int, steps: int) -> Tensor:
    """The pairs inside a token as a view [...,rows,steps,C] of A [...,rows·C,steps·C]."""
    C = A.shape[-1] // steps
    return A.unflatten(-1, (C, steps)).unflatten(-3, (C, rows)).diagonal(dim1=-4, dim2=-2)


def _to_size(x: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """x [...,K], summed over K where b has one decay per head."""
    return x.sum(-1, keepdim=True, dtype=dtype) if b.shape[-1] == 1 else x.to(dtype)


def _wide(whole: Tensor, a: Tensor) -> Tensor:
    return whole.expand(*a.shape[:5], -1, -1)
