"""Cutting time into chunks, for the chunkwise PyTorch implementations.

Inside a chunk everything is a matrix product; a loop carries the state from chunk to chunk. Packed documents are padded
one by one, so that no chunk ever holds tokens of two.

Layout of the chunked tensors, N chunks of C tokens: q, k [B,N,G,E,C,K]; v [B,N,G,R,C,V]; gates [B,N,G,R,E,C].
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .arguments import Recurrences, at_least_fp32

CHUNK = 64


class Chunking:
    """How the T tokens of `a` lie in N chunks of C."""

    def __init__(self, a: Recurrences):
        self.a, self.length = a, a.v.shape[1]
        self.size = min(CHUNK, self.length)
        self.chunks = a.documents.chunks(self.size) if a.documents else None
        self.count = len(self.chunks.starts) if self.chunks else -(-self.length // self.size)
        self.padded = self.count * self.size != self.length

    def split(self, x: Tensor) -> Tensor:
        """[B,T,…] → [B,N,C,…], zeros where there is no token."""
        if self.chunks:
            x = x[:, self.chunks.token]
            if self.padded:
                x = x.masked_fill(~self.chunks.valid.view(1, -1, *[1] * (x.dim() - 2)), 0)
        elif self.padded:
            x = F.pad(x, [0, 0] * (x.dim() - 2) + [0, self.count * self.size - self.length])
        return x.unflatten(1, (self.count, self.size))

    def join(self, x: Tensor) -> Tensor:
        """[B,N,C,…] → [B,T,…]."""
        x = x.flatten(1, 2)
        if self.chunks:
            return x[:, self.chunks.place] if self.padded else x
        return x[:, : self.length]

    def keys(self, x: Tensor) -> Tensor:
        """[B,T,G·E,K] → [B,N,G,E,C,K]."""
        return _rows(self.split(at_least_fp32(x)).unflatten(3, (self.a.groups, self.a.subheads)))

    def values(self, x: Tensor) -> Tensor:
        """[B,T,H,V] → [B,N,G,R,C,V]."""
        return _rows(self.split(at_least_fp32(x)).unflatten(3, (self.a.groups, self.a.repeats)))

    def gates(self, x: Tensor) -> Tensor:
        """[B,T,H·E] → [B,N,G,R,E,C], and [B,T,H·E,K] → [B,N,G,R,E,C,K]."""
        heads = (self.a.groups, self.a.repeats, self.a.subheads)
        return self.split(at_least_fp32(x)).unflatten(3, heads).movedim(2, 5)

    def outputs(self, o: Tensor) -> Tensor:
        """[B,N,G,R,C,V] → [B,T,H,V] in the dtype of v."""
        return self.join(o.permute(0, 1, 4, 2, 3, 5).flatten(3, 4)).to(self.a.v.dtype)

    def log_decay(self) -> Tensor | None:
        """log_decay summed from the start of its chunk, inclusive: [B,N,G,R,E,C] or […,C,K], in fp64.

        Differences of these sums are what counts, and their sums reach thousands: fp32 would leave four digits. Where
        the device has no fp64, fp32 must do. B and N are 1 for a constant decay without padding.
        """
        g = self.a.log_decay
        if g is None:
            return None
        if g.dim() == 1:
            # padding must not decay, so only a full grid can share one chunk of constants
            full = (1, self.size) if not self.padded else self.a.v.shape[:2]
            g = g.expand(*full, -1)
            if not self.padded:
                heads = (self.a.groups, self.a.repeats, self.a.subheads)
                return g.unflatten(2, heads).movedim(1, -1).unsqueeze(1).to(self._wide).cumsum(-1)
        g = self.gates(g)
        return g.to(self._wide).cumsum(5)

    @property
    def _wide(self) -> torch.dtype:
        return torch.float32 if self.a.v.device.type == "mps" else torch.float64

    def scan(self, step: Callable[[int, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Carry the state: `step(n, S)` gives the state after chunk n.

        Returns:
            The state before each chunk [B,N,G,R,E,K,V], and the final ones [sequences,H·E,K,V].
        """
        heads = (self.a.groups, self.a.repeats, self.a.subheads)
        first = self.a.first_state().unflatten(1, heads)
        before, after, S = [], [], first
        for n in range(self.count):
            if self.chunks and (document := self.chunks.starts[n]) is not None:
                S = first[document : document + 1]
            before.append(S)
            S = step(n, S)
            after.append(S)
        if self.chunks:
            ends = enumerate(self.chunks.ends)
            S = torch.cat([first[d : d + 1] if end is None else after[end] for d, end in ends])
        return torch.stack(before, 1), S.flatten(1, 3)


def _rows(x: Tensor) -> Tensor:
    """[B,N,C,I,J,X] → [B,N,I,J,C,X], contiguous: else each product copies it again."""
    return x.permute(0, 1, 3, 4, 2, 5).contiguous()


def causal_decay(b: Tensor, dtype: torch.dtype) -> Tensor:
    """D_ij = exp(b_i − b_j) for j ≤ i and 0 above: [...,C] → [...,C,C]. Never the exponential of a positive number."""
    # The diagonal is cut out before the exponential: its gradients would only cancel, and drown small ones in rounding.
    return (b.unsqueeze(-1) - b.unsqueeze(-2)).to(dtype).tril(-1).exp().tril()
