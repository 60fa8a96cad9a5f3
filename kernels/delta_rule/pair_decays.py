"""Products of the rows of a chunk, weighted by the decay between their tokens, with their gradients.

A_ij = Σ_c x_ic y_jc exp(r_ic − b_jc) for rows i and j whose tokens differ, j's before i's; a token has n rows, one for
each of its steps. b are log decays summed inside the chunk, and r are the sums that row i reads with: b, or b before
the token's own decay. Between the rows of one token nothing decays. Their products are computed apart: they cannot
disturb the gradient of the decay.

One reference point serves the rows of moderate decay (`chunking.factors`). Other rows are computed in blocks of tokens,
between which the reference is the token before the block; inside a block the differences themselves are exponentiated.
Which way computes a row depends on no later token.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..core.chunking import Factors, factors, powers

BLOCK = 16  # tokens


class PairDecays:
    """The decays between the tokens of a chunk.

    Args:
        b: Log decays summed inside chunks, inclusive [...,C,K], or [...,C,1] for one decay per head.
        steps: Steps n per token.
        dtype: Of the products.
    """

    def __init__(self, b: Tensor, steps: int, dtype: torch.dtype):
        self.steps, self.dtype = steps, dtype
        self.b = self.rows(b)
        # in compiled code, where values are unknown, no row is served by a reference point
        self.factors: Factors | None = None if torch.compiler.is_compiling() else factors(b, -2, dtype)
        self.token = torch.arange(b.shape[-2], device=b.device).repeat_interleave(steps)  # of each row

    def rows(self, x: Tensor) -> Tensor:
        """[...,C,·] → [...,nC,·]."""
        return x if self.steps == 1 else x.repeat_interleave(self.steps, -2)

    def products(self, x: Tensor, y: Tensor, sums: Tensor, token: Tensor) -> Tensor:
        """A [...,X,nC], for x [...,X,K] that read with `sums` [...,X,K|1], and whose tokens are `token` [X]."""
        f, beyond = self.factors, self._beyond(token)
        if f is None:
            return self._exact(x, y, sums)
        up, down = self._powers(f, sums)
        fast = ((x * up) @ (y * down).mT).masked_fill(self._same_or_later(token), 0)
        return fast if beyond is None else torch.where(beyond, self._exact(x, y, sums), fast)

    def gradients(self, dA: Tensor, x: Tensor, y: Tensor, sums: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of x and of y for every recurrence, from that of A."""
        dA = dA.masked_fill(self._same_or_later(token), 0)
        f, beyond = self.factors, self._beyond(token)
        if f is None:
            return self._exact_gradients(dA, x, y, sums)
        if beyond is None:
            return self._fast_gradients(f, dA, x, y, sums)
        exact = self._exact_gradients(dA.masked_fill(~beyond, 0), x, y, sums)
        fast = self._fast_gradients(f, dA.masked_fill(beyond, 0), x, y, sums)
        return exact[0] + fast[0], exact[1] + fast[1]

    def _same_or_later(self, token: Tensor) -> Tensor:
        """Pairs [X,nC] that do not count: the token of y is not before that of x."""
        return token[:, None] <= self.token

    def _beyond(self, token: Tensor) -> Tensor | None:
        """Rows of x [...,X,1] that the reference point does not serve; None if it serves all."""
        if self.factors is None or self.factors.beyond is None:
            return None
        return self.factors.beyond.any(-1, keepdim=True).index_select(-2, token)

    def _powers(self, f: Factors, sums: Tensor) -> tuple[Tensor, Tensor]:
        return powers(sums * (1 / math.log(2)), f.reference, self.dtype)[0], self.rows(f.down)

    def _fast_gradients(self, f: Factors, dA: Tensor, x: Tensor, y: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        up, down = self._powers(f, sums)
        return (dA @ (y * down)) * up, (dA.mT @ (x * up)) * down

    def _exact_gradients(self, dA: Tensor, x: Tensor, y: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.broadcast_shapes(x.shape[:-2], sums.shape[:-2], dA.shape[:-2])
        dxs, dy = [], y.new_zeros(*wide, *y.shape[-2:])
        for here, block, between, across in self._blocks(x, sums):
            inside, xi, yi = dA[..., here, block].unsqueeze(-1) * between, x[..., here, :], y[..., block, :]
            dx = (inside * yi.unsqueeze(-3)).sum(-2)
            dy[..., block, :] += (inside * xi.unsqueeze(-2)).sum(-3)
            if across is not None:
                (up, down), earlier = across, slice(block.start)
                dx = dx + (dA[..., here, earlier] @ (y[..., earlier, :] * down)) * up
                dy[..., earlier, :] += (dA[..., here, earlier].mT @ (xi * up)) * down
            dxs.append(dx.expand(*wide, -1, -1))
        return torch.cat(dxs, -2), dy

    def _exact(self, x: Tensor, y: Tensor, sums: Tensor) -> Tensor:
        """A for any decay; x has one row per token, or one per step."""
        length, rows = self.b.shape[-2], []
        for here, block, between, across in self._blocks(x, sums):
            xi, yi = x[..., here, :], y[..., block, :]
            row = [(xi.unsqueeze(-2) * between * yi.unsqueeze(-3)).sum(-1)]
            if across is not None:
                up, down = across
                row.insert(0, (xi * up) @ (y[..., : block.start, :] * down).mT)
            if block.stop < length:
                row.append(row[0].new_zeros(*row[-1].shape[:-1], length - block.stop))
            rows.append(torch.cat(row, -1))
        return torch.cat(rows, -2)

    def _blocks(self, x: Tensor, sums: Tensor) -> Iterator[tuple[slice, slice, Tensor, tuple[Tensor, Tensor] | None]]:
        """For each block of tokens: its rows of x and of y, the decays between them, and those to earlier rows of y.

        The latter are two factors, of the rows of x and of the earlier rows; the first block has none.
        """
        length, many = self.b.shape[-2], x.shape[-2] // (self.b.shape[-2] // self.steps)
        for first in range(0, length // self.steps, BLOCK):
            stop = min(first + BLOCK, length // self.steps)
            here, block = slice(first * many, stop * many), slice(first * self.steps, stop * self.steps)
            r, b, token = sums[..., here, :], self.b[..., block, :], torch.arange(first, stop, device=x.device)
            same_or_later = token.repeat_interleave(many)[:, None] <= token.repeat_interleave(self.steps)
            between = (r.unsqueeze(-2) - b.unsqueeze(-3)).to(self.dtype)
            between = between.masked_fill(same_or_later.unsqueeze(-1), -torch.inf).exp()
            across = None
            if first:
                reference = self.b[..., block.start - 1 : block.start, :]
                distances = r - reference, reference - self.b[..., : block.start, :]
                across = distances[0].to(self.dtype).exp(), distances[1].to(self.dtype).exp()
            yield here, block, between, across
