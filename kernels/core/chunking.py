"""Cutting time into chunks, for the chunkwise PyTorch implementations.

Inside a chunk everything is a matrix product; a loop carries the state from chunk to chunk. Each packed document is
padded separately, so that no chunk holds tokens of two documents.

Layout of the chunked tensors, N chunks of C tokens: q, k [N,B,G,E,C,K]; v [N,B,G,R,C,V]; gates [N,B,G,R,E,C]. The
chunk axis comes first, so that the slice of one chunk, which the loop reads, is contiguous.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .deterministic import is_deterministic
from .elementwise import exp2
from .expansion import expanded
from .recurrence import Recurrences, at_least_fp32
from .resets import sums

CHUNK = 64
# products of two factors 2^±this with numbers of usual size are finite, and keep all their digits
REACH, REACH_FP64 = 86.0, 480.0

Run = tuple[slice, range]  # a slice of the sequences, and the chunks that they pass through in order


class Chunking:
    """The T tokens of `a` as N chunks of C tokens: `size`, or all tokens if they are fewer."""

    def __init__(self, a: Recurrences, size: int = CHUNK):
        self.a, self.length = a, a.length
        self.size = size if is_deterministic() else min(size, self.length)  # products of one shape, however short
        self.chunks = a.documents.chunks(self.size) if a.documents else None
        self.count = self.chunks.count if self.chunks else -(-self.length // self.size)
        self.padded = self.count * self.size != self.length

    def split(self, x: Tensor) -> Tensor:
        """[B,T,…] → [N,B,C,…], padded with zeros."""
        if self.chunks:
            x = x[:, self.chunks.token]
            if self.padded:
                x = x.masked_fill(~self.chunks.valid.view(1, -1, *[1] * (x.dim() - 2)), 0)
        elif self.padded:
            x = F.pad(x, [0, 0] * (x.dim() - 2) + [0, self.count * self.size - self.length])
        return x.unflatten(1, (self.count, self.size)).transpose(0, 1)

    def join(self, x: Tensor) -> Tensor:
        """[N,B,C,…] → [B,T,…]."""
        x = x.transpose(0, 1).flatten(1, 2)
        if self.chunks:
            return x[:, self.chunks.place] if self.padded else x
        return x[:, : self.length]

    def keys(self, x: Tensor) -> Tensor:
        """[B,T,G·E,K] → [N,B,G,E,C,K]."""
        return _heads_first(self.split(at_least_fp32(x)).unflatten(3, (self.a.groups, self.a.subheads)))

    def values(self, x: Tensor) -> Tensor:
        """[B,T,H,V] → [N,B,G,R,C,V]."""
        return _heads_first(self.split(at_least_fp32(x)).unflatten(3, (self.a.groups, self.a.repeats)))

    def by_group(self, x: Tensor) -> Tensor:
        """[B,T,G·R,X] → [B,N,G,C,R,X], contiguous, with the heads of a group side by side. One group is not copied."""
        x = self.split(at_least_fp32(x)).transpose(0, 1).unflatten(3, (self.a.groups, -1))
        return x.transpose(2, 3).contiguous()

    def gates(self, x: Tensor) -> Tensor:
        """[B,T,H·E] → [N,B,G,R,E,C], and [B,T,H·E,K] → [N,B,G,R,E,C,K]."""
        heads = (self.a.groups, self.a.repeats, self.a.subheads)
        return self.split(at_least_fp32(x)).unflatten(3, heads).movedim(2, 5)

    def outputs(self, o: Tensor) -> Tensor:
        """[N,B,G,R,C,V] → [B,T,H,V] in the dtype of v."""
        return self.join(o.permute(0, 1, 4, 2, 3, 5).flatten(3, 4)).to(self.a.v.dtype)

    def log_decay(self) -> Tensor | None:
        """log_decay summed from the start of its chunk, inclusive: [N,B,G,R,E,C] or […,C,K], in fp64.

        Only differences of these sums are used, and the sums reach thousands: fp32 would leave four digits. Devices
        without fp64 have to make do with fp32. N and B are 1 for a constant decay without padding. A reset, −inf,
        counts as a finite number of which nothing is left (`resets.py`).
        """
        g = self.a.log_decay
        if g is None:
            return None
        if g.dim() == 1:
            # padding must not decay, so the chunks can share one row of sums only without padding
            full = (1, self.size) if not self.padded else self.a.q.shape[:2]
            g = g.expand(*full, -1)
            if not self.padded:
                heads = (self.a.groups, self.a.repeats, self.a.subheads)
                return sums(g.unflatten(2, heads).movedim(1, -1).unsqueeze(1), -1, self._wide)
        return sums(self.gates(g), 5, self._wide)

    @property
    def _wide(self) -> torch.dtype:
        return torch.float32 if self.a.v.device.type == "mps" else torch.float64

    def first_state(self) -> Tensor:
        """The state before each sequence [sequences,G,R,E,K,V], at least fp32."""
        return self.a.first_state().unflatten(1, (self.a.groups, self.a.repeats, self.a.subheads))

    def runs(self) -> list[Run]:
        """All sequences and their chunks; an empty document has no chunks."""
        if not self.chunks:
            return [(slice(None), range(self.count))]
        return [(slice(d, d + 1), chunks) for d, chunks in enumerate(self.chunks.of)]


def scan(runs: list[Run], first: Tensor, step: Callable[[int, Tensor], Tensor], *, back: bool = False) -> Tensor:
    """Carry the states [sequences,…] through the chunks: `step(n, S)` returns the state after chunk n.

    With `back`, the loop runs from the last chunk to the first, as gradients do.

    Returns:
        The final states [sequences,…].
    """
    last = []
    for rows, chunks in reversed(runs) if back else runs:
        S = first[rows]
        for n in reversed(chunks) if back else chunks:
            S = step(n, S)
        last.append(S)
    return last[0] if len(last) == 1 else torch.cat(last[::-1] if back else last)


def scan_stacked(runs: list[Run], first: Tensor, step: Callable[[int, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Like `scan`: the state before each chunk [N,B,…], and the final states [sequences,…]."""
    before = []

    def noted(n: int, S: Tensor) -> Tensor:
        before.append(S)
        return step(n, S)

    last = scan(runs, first, noted)
    return torch.stack(before), last


def _heads_first(x: Tensor) -> Tensor:
    """[N,B,C,I,J,X] → [N,B,I,J,C,X], contiguous: otherwise every product would copy it again."""
    return x.permute(0, 1, 3, 4, 2, 5).contiguous()


class Factors(NamedTuple):
    """Factors of the decays between the tokens of a chunk, 2^(b_i − b_j) = up_i · down_j.

    They are 2^(b − m) and 2^(m − b), for sums b of log2 decays and a reference point m near the sum in the middle of
    the chunk. m depends on later tokens than some i. It is a whole number, so another m changes no bit of a product.
    """

    up: Tensor
    down: Tensor
    reference: Tensor  # m, with one token
    beyond: Tensor | None  # True for tokens too far from m, and all after them; it depends on no later token


def factors(b: Tensor, dim: int, dtype: torch.dtype) -> Factors:
    """The factors in `dtype`, of log decays summed inside chunks, whose tokens lie on axis `dim`."""
    b = b * (1 / math.log(2))
    size, middle, values = b.shape[dim], (b.shape[dim] - 1) // 2, b.detach()
    centre, last = values.narrow(dim, middle, 1), values.narrow(dim, size - 1, 1)
    reach = REACH_FP64 if dtype == torch.float64 else REACH
    reference = centre.round().clamp_min(-reach)
    beyond = None
    if b.numel() and not b.is_meta and float(torch.minimum(centre, last - reference).min()) < -reach:
        early, late = values.split([middle + 1, size - middle - 1], dim)
        beyond = (torch.cat([early, late - reference], dim) < -reach).cummax(dim).values
    return Factors(*powers(b, reference, dtype), reference, beyond)


def powers(b: Tensor, reference: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """2^(b − m) and 2^(m − b) in `dtype` for whole numbers m; where b is too far from m, finite numbers."""
    reach = REACH_FP64 if dtype == torch.float64 else REACH
    whole = b.detach().floor()
    part, shift = (b - whole).to(dtype), (whole - reference).to(dtype).clamp(-reach, reach)
    return exp2(part) * shift.exp2(), exp2(-part) * (-shift).exp2()


def causal_decay(b: Tensor, dtype: torch.dtype) -> Tensor:
    """D_ij = exp(b_i − b_j) for j ≤ i and 0 above: [...,C] → [...,C,C]. It never exponentiates a positive number."""
    # in base 2: on a CPU, PyTorch's exp takes three times as long, and ten times more where it underflows
    b = b / math.log(2)
    pairs = (*b.shape, b.shape[-1])
    between = expanded(b.unsqueeze(-1), pairs) - expanded(b.unsqueeze(-2), pairs)
    # The diagonal is zeroed before the exponential: its gradients would only cancel, and drown small ones in rounding.
    return exp2(between.to(dtype).tril_(-1)).tril()
