"""Products of the rows of a chunk, weighted by the decay between their tokens, with their gradients.

A_ij = Σ_c x_ic y_jc exp(r_ic − b_jc) for rows i and j whose tokens differ, j's before i's; a token has n rows, one for
each of its steps. b are log decays summed inside the chunk, and r are the sums that row i reads with: b, or b before
the token's own decay. Between the rows of one token nothing decays. Their products are computed apart: they cannot
disturb the gradient of the decay.

With one decay per head, the decays are a matrix. Those per channel come by halves: blocks of tokens are halved until
single tokens are left, and each pair is a product of two factors at the level that separates it, the decays from j to
the boundary between the halves and from there to i. No exponent is positive, whatever the decays, and no factor of i
depends on later tokens.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from .deterministic import is_deterministic
from .elementwise import exp2


class PairDecays:
    """The decays between the tokens of a chunk.

    Args:
        b: Log decays summed inside chunks, inclusive [...,C,K], or [...,C,1] for one decay per head.
        steps: Steps n per token.
        dtype: Of the products.
    """

    def __init__(self, b: Tensor, steps: int, dtype: torch.dtype):
        self.steps, self.dtype, self.tokens = steps, dtype, b.shape[-2]
        self.b = self.rows(b)
        self.token = torch.arange(b.shape[-2], device=b.device).repeat_interleave(steps)  # of each row

    def rows(self, x: Tensor) -> Tensor:
        """[...,C,·] → [...,nC,·]."""
        return x if self.steps == 1 else x.repeat_interleave(self.steps, -2)

    def products(self, x: Tensor, y: Tensor, sums: Tensor, token: Tensor) -> Tensor:
        """A [...,X,nC], for x [...,X,K] that read with `sums` [...,X,K|1], and whose tokens are `token` [X]."""
        if sums.shape[-1] == 1:
            return (x @ y.mT) * self._of_heads(sums, token)
        shape = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2], sums.shape[:-2])
        A = x.new_zeros(*shape, self.length, x.shape[-2] // self.tokens, self.length, self.steps)
        x, y = self.padded(x), self.padded(y)
        for half, up, down in self.levels(sums):
            later, earlier = self.halves(x, half)[1] * up, self.halves(y, half)[0] * down
            pairs = self.outer(later, earlier, half)
            blocks(A, half).copy_(pairs.unflatten(-1, (half, -1)).unflatten(-3, (half, -1)))
        return A[..., : self.tokens, :, : self.tokens, :].flatten(-4, -3).flatten(-2)

    def gradients(self, dA: Tensor, x: Tensor, y: Tensor, sums: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of x and of y for every recurrence, from that of A."""
        if sums.shape[-1] == 1:
            dA = dA * self._of_heads(sums, token)
            return dA @ y, dA.mT @ x
        rows = x.shape[-2] // self.tokens
        dA = dA.unflatten(-2, (-1, rows)).unflatten(-1, (-1, self.steps))
        dA = F.pad(dA, (0, 0, 0, self.length - self.tokens, 0, 0, 0, self.length - self.tokens))
        shape = torch.broadcast_shapes(dA.shape[:-4], x.shape[:-2], sums.shape[:-2])
        dx = x.new_zeros(*shape, self.length * rows, x.shape[-1])
        dy = y.new_zeros(*shape, self.length * self.steps, y.shape[-1])
        x, y = self.padded(x), self.padded(y)
        for half, up, down in self.levels(sums):
            later, earlier = self.halves(x, half)[1] * up, self.halves(y, half)[0] * down
            pairs = blocks(dA, half).flatten(-4, -3).flatten(-2)
            self.halves(dx, half)[1].addcmul_(self.mixed(pairs, earlier, half), up)
            self.halves(dy, half)[0].addcmul_(self.mixed(pairs, later, half, back=True), down)
        return dx[..., : rows * self.tokens, :], dy[..., : self.steps * self.tokens, :]

    @property
    def length(self) -> int:
        """Tokens of a chunk that is padded to a power of two."""
        return 1 << max(0, self.tokens - 1).bit_length()

    def _of_heads(self, sums: Tensor, token: Tensor) -> Tensor:
        """The decays between tokens [...,X,nC], 0 for pairs that do not count."""
        between = (sums - self.b.mT) * (1 / math.log(2))
        return exp2(between.to(self.dtype).masked_fill(token[:, None] <= self.token, -torch.inf))

    def padded(self, x: Tensor) -> Tensor:
        """x with rows for `length` tokens, of zeros."""
        missing = self.length - self.tokens
        return x if missing == 0 else F.pad(x, (0, 0, 0, missing * (x.shape[-2] // self.tokens)))

    def halves(self, x: Tensor, half: int) -> tuple[Tensor, ...]:
        """Views [...,blocks,rows,K] of the first and second halves of blocks, of x with `length` tokens."""
        return x.unflatten(-2, (self.length // (2 * half), 2, -1)).unbind(-3)

    def outer(self, later: Tensor, earlier: Tensor, half: int) -> Tensor:
        """later · earlierᵀ in each block [...,blocks,·,·], for rows of second and of first halves."""
        if not is_deterministic():
            return later @ earlier.mT
        # On a CPU, the bits of small products depend on their number, those of whole chunks do not.
        whole = self._placed(later, half, 1) @ self._placed(earlier, half, 0).mT
        whole = whole.unflatten(-1, (self.length, -1)).unflatten(-3, (self.length, -1))
        return blocks(whole, half).flatten(-4, -3).flatten(-2)

    def mixed(self, pairs: Tensor, rows: Tensor, half: int, *, back: bool = False) -> Tensor:
        """pairs · rows in each block, or with `back` pairsᵀ · rows: [...,blocks,·,K]."""
        if not is_deterministic():
            return (pairs.mT if back else pairs) @ rows
        shape = (self.length, pairs.shape[-2] // half, self.length, pairs.shape[-1] // half)
        square = pairs.new_zeros(*pairs.shape[:-3], *shape)
        blocks(square, half).copy_(pairs.unflatten(-1, (half, -1)).unflatten(-3, (half, -1)))
        square = square.flatten(-4, -3).flatten(-2)
        whole = (square.mT if back else square) @ self._placed(rows, half, 1 if back else 0)
        return self.halves(whole, half)[0 if back else 1]

    def _placed(self, rows: Tensor, half: int, second: int) -> Tensor:
        """The rows of halves of blocks, among zeros for the other halves [...,rows,K]."""
        whole = rows.new_zeros(*rows.shape[:-3], 2 * rows.shape[-3] * rows.shape[-2], rows.shape[-1])
        self.halves(whole, half)[second].copy_(rows)
        return whole

    def levels(self, sums: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """For each level: tokens in half a block, factors of second halves of x, and of first halves of y."""
        reads, b = (self.padded(x * (1 / math.log(2))) for x in (sums, self.b))
        half = self.length // 2
        while half:
            first = self.halves(b, half)[0]
            at = first[..., -1:, :]
            up, down = self.halves(reads, half)[1] - at, at - first
            # positive ones belong to padding
            up, down = (exp2(x.to(self.dtype).clamp_(max=0)) for x in (up, down))
            yield half, up, down
            half //= 2


def blocks(A: Tensor, half: int) -> Tensor:
    """A view of the pairs that a level separates [...,blocks,half,·,half,·], of A [...,L,·,L,·]."""
    A = A.unflatten(-2, (-1, 2, half)).unflatten(-6, (-1, 2, half))  # [...,blocks,2,half,·,blocks,2,half,·]
    return A.diagonal(dim1=-8, dim2=-4).movedim(-1, -7)[..., 1, :, :, 0, :, :]
