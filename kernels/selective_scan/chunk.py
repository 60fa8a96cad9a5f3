"""The selective scan in plain PyTorch, with autograd: the CPU path.

All chunks run their C steps side by side from zero; then the state is carried from chunk to chunk, and what it adds to
every step is the decay since the start of the chunk. No exponential of a positive number is ever taken.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .arguments import Scan

CHUNK = 16


def forward(a: Scan) -> tuple[Tensor, Tensor]:
    """y [B,T,D] and the final states [S,D,N]."""
    with torch.autocast(a.x.device.type, enabled=False):
        B, T, _ = a.x.shape
        log_decay, added, c = a.steps()
        C = min(CHUNK, T)
        chunks = a.documents.chunks(C) if a.documents else None
        count = len(chunks.starts) if chunks else -(-T // C)

        def split(x: Tensor) -> Tensor:  # [B,T,D,N] → [B,n,C,D,N], padding neither decays nor adds
            if chunks:
                x = x[:, chunks.token].masked_fill(~chunks.valid[:, None, None], 0)
            else:
                x = F.pad(x, (0, 0, 0, 0, 0, count * C - T))
            return x.unflatten(1, (count, C))

        log_decay, added = split(log_decay), split(added)
        decay, h, local = log_decay.exp(), added[:, :, 0], [added[:, :, 0]]
        for t in range(1, C):
            h = decay[:, :, t] * h + added[:, :, t]
            local.append(h)
        since_start = log_decay.cumsum(2).exp()
        first = a.first_state()
        carried, before, after = first, [], []
        for n in range(count):
            if chunks and (document := chunks.starts[n]) is not None:
                carried = first[document : document + 1]
            before.append(carried)
            carried = since_start[:, n, -1] * carried + local[-1][:, n]
            after.append(carried)
        states = torch.stack(local, 2) + since_start * torch.stack(before, 1).unsqueeze(2)
        states = states.flatten(1, 2)
        states = states[:, chunks.place] if chunks else states[:, :T]
        if chunks:
            ends = enumerate(chunks.ends)
            carried = torch.cat([first[d : d + 1] if end is None else after[end] for d, end in ends])
        return (states * c).sum(-1).to(a.x.dtype), carried
