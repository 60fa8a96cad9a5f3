"""The selective scan as a loop over time, easy to check against the papers by eye."""

import torch
from torch import Tensor

from .arguments import Scan


def forward(a: Scan) -> tuple[Tensor, Tensor]:
    """y [B,T,D] and the final states [S,D,N]."""
    log_decay, added, c = a.steps()
    c = c.expand(*a.x.shape[:2], -1, -1)
    first, outputs, finals = a.first_state(), [], []
    spans = enumerate(a.documents.spans) if a.documents else [(slice(None), (0, a.x.shape[1]))]
    for row, (start, stop) in spans:
        h = first[row : row + 1] if isinstance(row, int) else first
        for t in range(start, stop):
            h = log_decay[:, t].exp() * h + added[:, t]
            outputs.append((h * c[:, t]).sum(-1))
        finals.append(h)
    return torch.stack(outputs, 1).to(a.x.dtype), torch.cat(finals)
