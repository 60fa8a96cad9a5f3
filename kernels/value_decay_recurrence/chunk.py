"""The recurrence with a decay per value channel, chunk by chunk in plain PyTorch, with autograd.

With b the log decays summed inside a chunk, [C,V]:

    O_iv = e^{b_iv} (Q Sᵀ)_iv + Σ_{j ≤ i} (Q Kᵀ)_ij e^{b_iv − b_jv} V_jv      S ← diag(e^{b_C}) S + (V e^{b_C − b})ᵀ K

The scores Q Kᵀ have no decay, so one matrix product serves all channels: O = e^{b − r} ⊙ ((Q Kᵀ) (V ⊙ e^{r − b})). If
the decays of a channel are too strong for one reference point r, its rows are computed block by block. No bit of an
output depends on later tokens.
"""

import torch
from torch import Tensor

from ..core.autocast import without_autocast
from ..core.chunking import Chunking, factors, scan_stacked
from ..core.recurrence import Recurrences
from ..linear_recurrence.chunk import BLOCK


def forward(a: Recurrences, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return o [B,T,H,V] and the final states [N,H,V,K]; `a.k` holds the values, and `a.v` the keys."""
    with without_autocast(a.v.device):
        c = Chunking(a)
        q, k, v = (c.keys(x).squeeze(3) for x in (q, a.v, a.k))  # [N,B,H,C,·]
        q, b = q * a.scale, c.log_decay()
        assert b is not None
        b = b.flatten(3, 4).squeeze(3)
        own = (q * k).sum(-1, keepdim=True)  # a token's own value does not decay
        o = own * v + _earlier((q @ k.mT).tril(-1), v, b)
        last = b[..., -1:, :]
        new = ((v * (last - b).to(v.dtype).exp()).mT @ k).unbind()
        decay = last.to(v.dtype).exp().mT.unbind()
        before, S = scan_stacked(c.runs(), c.first_state().flatten(1, 3), lambda n, S: decay[n] * S + new[n])
        o = o + (q @ before.mT) * b.to(v.dtype).exp()
        return c.join(o.transpose(2, 3)), S


def _earlier(scores: Tensor, v: Tensor, b: Tensor) -> Tensor:
    """Return Σ_{j<i} scores_ij exp(b_i − b_j) ⊙ v_j [...,C,V] of strictly lower triangular scores [...,C,C]."""
    if torch.compiler.is_compiling():  # the branch below depends on values
        return _by_blocks(scores, v, b)
    f = factors(b, -2, v.dtype)
    o = f.up * (scores @ (v * f.down))
    return o if f.beyond is None else torch.where(f.beyond, _by_blocks(scores, v, b), o)


def _by_blocks(scores: Tensor, v: Tensor, b: Tensor) -> Tensor:
    """Return `_earlier` for decays of any strength.

    Inside a block, decays are differences of b. Between blocks, the row before a block is the reference point.
    """
    dtype, size, rows = v.dtype, b.shape[-2], []
    for start in range(0, size, BLOCK):
        stop = min(start + BLOCK, size)
        here, within = b[..., start:stop, :], scores[..., start:stop, start:stop]
        above = torch.ones(stop - start, stop - start, dtype=torch.bool, device=b.device).triu().unsqueeze(-1)
        between = (here.unsqueeze(-2) - here.unsqueeze(-3)).to(dtype).masked_fill(above, -torch.inf).exp()
        row = torch.einsum("...ij,...ijv,...jv->...iv", within, between, v[..., start:stop, :])
        if start:
            reference = b[..., start - 1 : start, :]
            decayed = v[..., :start, :] * (reference - b[..., :start, :]).to(dtype).exp()
            row = row + (scores[..., start:stop, :start] @ decayed) * (here - reference).to(dtype).exp()
        rows.append(row)
    return torch.cat(rows, -2)
