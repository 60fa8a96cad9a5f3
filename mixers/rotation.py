"""Angles that depend on the data and add up along time: those of a data-dependent rotary embedding."""

from typing import Any

import torch
from torch import Tensor

from kernels.core.documents import places
from kernels.token_shift import starting

from .context_parallel import ContextParallel
from .shift import last_tokens

# Sums of multiples of 1 / GRID are exact in fp64 while those along a row stay below 16,384 turns (half of 2¹⁵), so
# their order does not matter.
GRID = 2.0**38
BLOCK = 64  # tokens that are added up one after the other; a GPU adds up all blocks at the same time


def cumulative_angles(
    angles: Tensor, before: Tensor | None, cu_seqlens: Tensor | None, context_parallel: ContextParallel | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Add up angles along time, modulo 1, with the exact same result in any batch, document or piece.

    Args:
        angles: Angles that each token adds [B,T,…], in full turns.
        before: Sum of the tokens before, in fp64 [N,…] (N = B without `cu_seqlens`); None for 0.
        cu_seqlens: Boundaries [N+1] of packed documents, or None.
        context_parallel: Which part of each sequence `angles` are.

    Returns:
        Sums in [0, 1) with and without the token's own angle, in the shape and dtype of `angles`, and the last ones
        [N,…] in fp64; None without `before`.
    """
    total, earlier = _RunningSum.apply(angles, cu_seqlens)
    if context_parallel is not None:
        context_parallel.check(before, cu_seqlens)
        whole = _after_earlier_parts(total, cu_seqlens, context_parallel)
        total, earlier = whole, earlier + (whole - total)
    if before is not None:
        first = starting(total, before, cu_seqlens)[1]
        total, earlier = total + first, earlier + first
    total, earlier = total.remainder(1), earlier.remainder(1)
    last = None if before is None else last_tokens(total, before, cu_seqlens)
    return total.to(angles.dtype), earlier.to(angles.dtype), last


def _after_earlier_parts(total: Tensor, cu_seqlens: Tensor | None, context_parallel: ContextParallel) -> Tensor:
    """Sums [B,T,…] within a part, with those of the parts before for the sequences that began there."""

    def continued(first: Tensor) -> tuple[Tensor, Tensor]:
        before = first[:, None]
        if cu_seqlens is not None:
            before = before * context_parallel.continued_tokens().view(-1, *[1] * (total.dim() - 2))
        whole = total + before
        return whole, whole[:, -1]

    return context_parallel.continued(continued, torch.zeros_like(total[:, 0]), [total])


class _RunningSum(torch.autograd.Function):
    """Sums of x [B,T,…] along time in each document, in fp64 on the grid: with and without the token itself.

    Their gradients repeat to the bit; those of an index would be summed in any order on a GPU.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.cu_seqlens, ctx.dtype = cu_seqlens, x.dtype
        wide = (x.double() * GRID).round_().div_(GRID)
        total = _sums(wide)
        if cu_seqlens is not None:
            _, place = places(cu_seqlens, x.shape[1])
            first = torch.arange(x.shape[1], device=x.device) - place
            total = total - (total - wide)[:, first]
        return total, total - wide

    @staticmethod
    def backward(ctx: Any, of_total: Tensor, of_earlier: Tensor) -> tuple[Tensor, None]:
        gradient = of_total + of_earlier
        total, last = _sums(gradient), slice(-1, None)
        if ctx.cu_seqlens is not None:
            owner, _ = places(ctx.cu_seqlens, gradient.shape[1])
            last = (ctx.cu_seqlens[1:].long() - 1)[owner]
        return (total[:, last] - total + of_total).to(ctx.dtype), None


def _sums(x: Tensor) -> Tensor:
    """Sums of x [B,T,…] along time: within blocks, and of the blocks before."""
    T = x.shape[1]
    if T <= BLOCK:
        return x.cumsum(1)
    padded = torch.cat([x, x.new_zeros(x.shape[0], -T % BLOCK, *x.shape[2:])], 1) if T % BLOCK else x
    within = padded.unflatten(1, (-1, BLOCK)).cumsum(2)
    ends = within[:, :-1, -1].cumsum(1)
    within[:, 1:] += ends[:, :, None]
    return within.flatten(1, 2)[:, :T]
