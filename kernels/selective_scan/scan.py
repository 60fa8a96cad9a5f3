"""The selective scan in plain PyTorch, with autograd.

The CPU path steps through time and processes all rows, channels and states in each step. The operands of a step fit
into the cache, which the [B,T,D,N] tensors of a chunkwise form do not: that form was five to ten times slower.
"""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from ..core.autocast import without_autocast
from ..core.deterministic import is_deterministic
from ..core.expansion import expanded
from ..core.recurrence import at_least_fp32
from .arguments import Scan


def forward(a: Scan) -> tuple[Tensor, Tensor]:
    """y [B,T,D] and the final states [S,D,N]."""
    with without_autocast(a.x.device):
        rate = at_least_fp32(a.rate)
        constant = at_least_fp32(a.c) if a.c is not None and a.c.dim() == 2 else None
        # unbound, not indexed: the gradient of every index would be a tensor of the full size
        inputs, decays = at_least_fp32(a.x), a.decays
        steps = zip(
            (-decays * inputs if a.scale_inputs else inputs).unbind(1),
            decays.unbind(1),
            _unbound(a.b),
            _unbound(None if constant is not None else a.c),
            strict=False,
        )
        first, outputs, finals = a.first_state(), [], []
        spans = a.documents.spans if a.documents else [(0, a.x.shape[1])]
        for number, (start, stop) in enumerate(spans):
            h = first[number : number + 1] if a.documents else first
            for x, log_decay, b, c in itertools.islice(steps, stop - start):
                added = x.unsqueeze(-1) if b is None else x.unsqueeze(-1) * expanded(b.unsqueeze(1), h.shape)
                h = torch.addcmul(added, (log_decay.unsqueeze(-1) * rate).exp(), h)
                outputs.append(_read(h, c, constant))
            finals.append(h)
        y = torch.stack(outputs, 1)
        if a.skip is not None:
            y = torch.addcmul(y, at_least_fp32(a.skip), inputs)
        return y.to(a.x.dtype), torch.cat(finals)


def _unbound(x: Tensor | None) -> Iterator[Tensor | None]:
    return itertools.repeat(None) if x is None else iter(at_least_fp32(x).unbind(1))


def _read(h: Tensor, c: Tensor | None, constant: Tensor | None) -> Tensor:
    """y [B,D] of the states h [B,D,N]."""
    if c is not None:
        c = c.to(h.dtype)
        if is_deterministic():  # the rounding of a product with a vector depends on the number of rows
            return (h * expanded(c.unsqueeze(1), h.shape)).sum(-1)
        return (h @ c.unsqueeze(-1)).squeeze(-1)
    return h.sum(-1) if constant is None else (h * constant).sum(-1)


def reference(a: Scan) -> tuple[Tensor, Tensor]:
    """The loop over time as the papers have it."""
    x, log_decay = at_least_fp32(a.x), a.decays.unsqueeze(-1) * at_least_fp32(a.rate)
    skipped = 0 if a.skip is None else at_least_fp32(a.skip) * x
    x = (-a.decays * x if a.scale_inputs else x).unsqueeze(-1)
    added = x.expand_as(log_decay) if a.b is None else x * at_least_fp32(a.b).unsqueeze(2)
    c = at_least_fp32(log_decay.new_ones(1, 1) if a.c is None else a.c)
    c = (c if c.dim() == 2 else c.unsqueeze(2)).expand(*a.x.shape[:2], -1, -1)
    first, outputs, finals = a.first_state(), [], []
    spans = enumerate(a.documents.spans) if a.documents else [(slice(None), (0, a.x.shape[1]))]
    for row, (start, stop) in spans:
        h = first[row : row + 1] if isinstance(row, int) else first
        for t in range(start, stop):
            h = log_decay[:, t].exp() * h + added[:, t]
            outputs.append((h * c[:, t]).sum(-1))
        finals.append(h)
    return (torch.stack(outputs, 1) + skipped).to(a.x.dtype), torch.cat(finals)
