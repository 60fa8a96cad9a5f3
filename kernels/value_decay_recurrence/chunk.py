"""The recurrence with a decay per value channel, chunk by chunk in plain PyTorch, with autograd.

With b the log decays summed inside a chunk, [C,V]:

    O_iv = e^{b_iv} (Q Sᵀ)_iv + Σ_{j ≤ i} (Q Kᵀ)_ij e^{b_iv − b_jv} V_jv      S ← diag(e^{b_C}) S + (V e^{b_C − b})ᵀ K

The scores Q Kᵀ have no decay, so one matrix product serves all channels. The decays between tokens come by halves
(`core/pair_decays.py`). No bit of an output depends on later tokens.
"""

from typing import Any

import torch
from torch import Tensor

from ..core.autocast import without_autocast
from ..core.autograd import once
from ..core.chunking import Chunking, scan_stacked
from ..core.deterministic import in_mode, is_deterministic
from ..core.pair_decays import PairDecays, blocks
from ..core.recurrence import Recurrences


def forward(a: Recurrences, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return o [B,T,H,V] and the final states [N,H,V,K]; `a.k` holds the values, and `a.v` the keys."""
    with without_autocast(a.v.device):
        c = Chunking(a)
        q, k, v = (c.keys(x).squeeze(3) for x in (q, a.v, a.k))  # [N,B,H,C,·]
        q, b = q * a.scale, c.log_decay()
        assert b is not None
        b = b.flatten(3, 4).squeeze(3)
        own = (q * k).sum(-1, keepdim=True)  # a token's own value does not decay
        o = own * v + _Earlier.apply(q @ k.mT, v, b)
        last = b[..., -1:, :]
        new = ((v * (last - b).to(v.dtype).exp()).mT @ k).unbind()
        decay = last.to(v.dtype).exp().mT.unbind()
        before, S = scan_stacked(c.runs(), c.first_state().flatten(1, 3), lambda n, S: decay[n] * S + new[n])
        o = o + (q @ before.mT) * b.to(v.dtype).exp()
        return c.join(o.transpose(2, 3)), S


class _Earlier(torch.autograd.Function):
    """Σ_{j<i} scores_ij exp(b_i − b_j) ⊙ v_j [...,C,V], for scores [...,C,C] of which those with j < i count."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, v: Tensor, b: Tensor) -> Tensor:
        decays, o = _padded(b, v)
        pairs, values = decays.padded(decays.padded(scores).mT).mT, decays.padded(v)
        for half, up, down in decays.levels(b):
            earlier = decays.halves(values, half)[0] * down
            decays.halves(o, half)[1].addcmul_(decays.mixed(_pairs(pairs, half), earlier, half), up)
        o = o[..., : v.shape[-2], :]
        ctx.save_for_backward(scores, v, b, o)
        ctx.mode = is_deterministic()  # the backward pass on a GPU runs in another thread
        return o

    @staticmethod
    @once
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, ...]:
        if ctx.mode == is_deterministic():  # the compiler cannot trace the other way
            return _gradients_of_earlier(do, *ctx.saved_tensors)
        return in_mode(ctx.mode, _gradients_of_earlier, do, *ctx.saved_tensors)


def _gradients_of_earlier(do: Tensor, scores: Tensor, v: Tensor, b: Tensor, o: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of scores, v and b of `_Earlier`, from that of its outputs o."""
    decays, dv = _padded(b, v)
    pairs, values, wide = decays.padded(decays.padded(scores).mT).mT, decays.padded(v), decays.padded(do)
    dpairs = torch.zeros_like(pairs)
    for half, up, down in decays.levels(b):
        later, earlier = decays.halves(wide, half)[1] * up, decays.halves(values, half)[0] * down
        decays.halves(dv, half)[0].addcmul_(decays.mixed(_pairs(pairs, half), later, half, back=True), down)
        _pairs(dpairs, half).copy_(decays.outer(later, earlier, half))
    C = v.shape[-2]
    dv = dv[..., :C, :]
    return dpairs[..., :C, :C], dv, (do * o).to(b.dtype) - (v * dv).to(b.dtype)


def _padded(b: Tensor, v: Tensor) -> tuple[PairDecays, Tensor]:
    """The decays between the tokens of a chunk, and zeros [...,L,V] for all tokens of a padded chunk."""
    decays = PairDecays(b, 1, v.dtype)
    return decays, v.new_zeros(*v.shape[:-2], decays.length, v.shape[-1])


def _pairs(A: Tensor, half: int) -> Tensor:
    """A view of the pairs that a level separates [...,blocks,half,half], of A [...,L,L]."""
    return blocks(A.unsqueeze(-1).unsqueeze(-3), half)[..., 0, :, 0]
