"""Angles that depend on the data and add up along time: those of a data-dependent rotary embedding."""

import torch
from torch import Tensor

from kernels.token_shift import starting
from kernels.turns import angles_of, running_sums, turns

from .context_parallel import ContextParallel
from .shift import last_tokens


def cumulative_angles(
    rates: Tensor,
    steps: Tensor,
    before: Tensor | None,
    cu_seqlens: Tensor | None,
    context_parallel: ContextParallel | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Add up angles along time, modulo 1, with the exact same result in any batch, document or piece.

    Args:
        rates: Rate of each pair [B,T,P], in half turns.
        steps: Step of each head [B,T,H]. The angle that a token adds is rate · step / 2, in full turns.
        before: Sum of the tokens before, in fp64 [N,H,P] (N = B without `cu_seqlens`); None for 0.
        cu_seqlens: Boundaries [N+1] of packed documents, or None.
        context_parallel: The part of each sequence that this process holds.

    Returns:
        Sums [B,T,H,P] from 0 to 1 with and without the token's own angle, in the dtype of `rates`, and the last ones
        [N,H,P] in fp64; None without `before`.
    """
    if before is None and context_parallel is None:
        return *turns(rates, steps, cu_seqlens), None
    total, earlier = running_sums(angles_of(rates, steps), cu_seqlens)
    if context_parallel is not None:
        context_parallel.check(before, cu_seqlens)
        of_sequence = _after_earlier_parts(total, cu_seqlens, context_parallel)
        total, earlier = of_sequence, earlier + (of_sequence - total)
    if before is not None:
        first = starting(total, before, cu_seqlens)[1]
        total, earlier = total + first, earlier + first
    total, earlier = total.remainder(1), earlier.remainder(1)
    last = None if before is None else last_tokens(total, before, cu_seqlens)
    return total.to(rates.dtype), earlier.to(rates.dtype), last


def _after_earlier_parts(total: Tensor, cu_seqlens: Tensor | None, context_parallel: ContextParallel) -> Tensor:
    """Sums [B,T,…] within a part, with those of the parts before for the sequences that began there."""

    def continued(first: Tensor) -> tuple[Tensor, Tensor]:
        before = first[:, None]
        if cu_seqlens is not None:
            before = before * context_parallel.continued_tokens().view(-1, *[1] * (total.dim() - 2))
        with_before = total + before
        return with_before, with_before[:, -1]

    return context_parallel.continued(continued, torch.zeros_like(total[:, 0]), [total])
