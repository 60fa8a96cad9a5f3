"""One recurrence as a matrix over pairs of tokens, and what becomes of its writes; all in fp64.

The linear recurrence reads o_t = Σ_s A_ts v_s, where A_ts is q_t·k_s times the decay between s and t. The delta rule
writes v_s less what the state holds for its erase key: with R the products of queries and keys, and L those of erase
keys and earlier keys, A = R (I + L)⁻¹ diag(β).
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Recurrence(NamedTuple):
    """The streams of one recurrence over one document; there are W = nT writes, n `steps` for each of T tokens."""

    q: Tensor  # queries times the scale [T,K]
    k: Tensor  # [W,K]
    log_decay: Tensor  # before each write [W,K] or [W,1]
    beta: Tensor  # factors of the values [W]
    erase: Tensor | None  # erase keys times β [W,K]; None without a delta rule
    read_before: bool  # whether erase keys read the state before it decays
    steps: int

    def attention(self) -> Tensor:
        """A [T,W]."""
        last = slice(self.steps - 1, None, self.steps)  # tokens read after their last write
        reads = torch.zeros_like(self.k)
        reads[last] = self.q
        scores = pair_products(reads, self.k, self.log_decay)[last]
        if self.erase is not None:
            lower = pair_products(self.erase, self.k, self.log_decay, before=self.read_before)
            scores = torch.linalg.solve_triangular(lower, scores, upper=False, left=False, unitriangular=True)
        return scores * self.beta

    def retention(self) -> tuple[Tensor, ...]:
        """`Retention` of this recurrence."""
        k, g, W, n = self.k, self.log_decay.exp(), len(self.k), self.steps
        direction = k / k.square().sum(-1, keepdim=True).clamp(min=torch.finfo(k.dtype).tiny)
        shares = k.new_full((3, W // n, W), math.nan)
        whole, took = torch.zeros_like(k), k.new_zeros(2, W)  # whole: what is left of each key
        most, eraser = k.new_zeros(W), torch.full((W,), -1)
        for i in range(W):
            held = whole[:i]
            before = held.clone()
            held *= g[i]
            took[0, :i] += ((before - held) * direction[:i]).sum(-1)
            if self.erase is not None:
                change = ((before if self.read_before and i % n == 0 else held) @ self.erase[i])[:, None] * k[i]
                held -= change
                lost = (change * direction[:i]).sum(-1)
                took[1, :i] += lost
                eraser[:i], most[:i] = torch.where(lost > most[:i], i, eraser[:i]), torch.maximum(lost, most[:i])
            whole[i] = k[i]
            if (i + 1) % n == 0:
                left = (whole[: i + 1] * direction[: i + 1]).sum(-1)
                shares[:, i // n, : i + 1] = torch.stack([left, *took[:, : i + 1]])
        return *shares, eraser, most


def pair_products(x: Tensor, y: Tensor, log_decay: Tensor, *, before: bool = False) -> Tensor:
    """P [W,W] with P_ij = Σ_k x_ik y_jk exp(Σ_{j<l≤i} g_l) for j ≤ i, and 0 above the diagonal.

    Pairs are separated by halves of blocks, and decays summed from the boundary between both halves: every exponent is
    a sum of log decays, never a difference, so that it is exact at resets, too.

    Args:
        x: Rows [W,K].
        y: Columns [W,K].
        log_decay: g [W,K] or [W,1].
        before: Whether the sums leave out the decay of row i itself.
    """
    size = len(x)
    whole = 1 << (size - 1).bit_length()
    x, y, log_decay = (F.pad(z, (0, 0, 0, whole - size)) for z in (x, y, log_decay))
    pairs = torch.diag_embed((x * y).sum(-1))
    half = whole // 2
    while half:
        later, earlier, g = (z.unflatten(0, (-1, 2, half)) for z in (x, y, log_decay))
        up, down = g[:, 1].cumsum(1), g[:, 0].flip(1).cumsum(1).flip(1)
        up = F.pad(up[:, :-1], (0, 0, 1, 0)) if before else up
        down = F.pad(down[:, 1:], (0, 0, 0, 1))
        blocks = (later[:, 1] * up.exp()) @ (earlier[:, 0] * down.exp()).mT
        places = pairs.view(len(blocks), 2, half, len(blocks), 2, half)[:, 1, :, :, 0]
        torch.diagonal(places, dim1=0, dim2=2).copy_(blocks.permute(1, 2, 0))
        half //= 2
    return pairs[:size, :size]
