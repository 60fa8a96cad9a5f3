"""Mixtures of each token with the previous one: the token shift of RWKV."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..core.autograd import plain
from ..core.backend import Op, loaded
from ..core.documents import documents, places
from ..core.recompute import remake
from ..core.recurrence import at_least_fp32
from ..norm import dtype_of

MOST = 6  # mixtures that the kernels take


def composed(
    x: Tensor, shares: Tensor, before: Tensor | None, cu_seqlens: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """The mixtures in PyTorch."""
    wide = at_least_fp32(x)
    difference = previous_tokens(wide, before, cu_seqlens) - wide
    return tuple((wide + difference * share).to(dtype) for share in at_least_fp32(shares))


def starting(x: Tensor, before: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return a mask of the first tokens of each sequence of x [B,T,…], and `before` [N,…] for each token.

    Both can be broadcast to x.
    """
    if cu_seqlens is None:
        place, first = torch.arange(x.shape[1], device=x.device), before[:, None]
    else:
        owner, place = places(cu_seqlens, x.shape[1])
        first = before[owner][None]
    return (place == 0).view(1, -1, *[1] * (x.dim() - 2)), first.to(x.dtype)


def previous_tokens(x: Tensor, before: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """The token before each token of x [B,T,…]: in front of each sequence that of `before` [N,…], by default zeros."""
    if cu_seqlens is None:  # one copy
        first = x.new_zeros(len(x), 1, *x.shape[2:]) if before is None else before[:, None].to(x.dtype)
        return torch.cat([first, x[:, :-1]], 1)
    if before is None:
        starts = (places(cu_seqlens, x.shape[1])[1] == 0).view(1, -1, *[1] * (x.dim() - 2))
        return torch.where(starts, 0, x.roll(1, 1))
    starts, first = starting(x, before, cu_seqlens)
    return torch.where(starts, first, x.roll(1, 1))


def moved(x: Tensor) -> Tensor:
    """`previous_tokens` of whole sequences without a state, for code without gradients."""
    rows = x.flatten(2)
    whole = rows.stride(2) == 1 and rows.stride(0) == rows.shape[1] * rows.stride(1)
    if not (x.is_cuda and x.numel() and whole):
        return previous_tokens(x, None, None)
    y = x.new_empty(x.shape)  # a launch that copies all rows to the next places, though those are of other sequences
    loaded("kernels.gpu.rows:copy_rows")(rows.flatten(0, 1)[:-1], y.flatten(2).flatten(0, 1)[1:])
    y[:, 0] = 0
    return y


def reference(
    x: Tensor, shares: Tensor, before: Tensor | None, cu_seqlens: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """The mixtures as a loop over tokens."""
    mixed, wide, weights = [], at_least_fp32(x), at_least_fp32(shares)
    bounds = [0, x.shape[1]] if cu_seqlens is None else documents(cu_seqlens, x.shape[1]).bounds
    first = wide.new_zeros(len(x) * (len(bounds) - 1), x.shape[2]) if before is None else at_least_fp32(before)
    for n, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
        previous = first if cu_seqlens is None else first[n : n + 1]  # [B,D]
        for t in range(start, stop):
            mixed.append((1 - weights) * wide[:, t, None] + weights * previous[:, None])
            previous = wide[:, t]
    return torch.stack(mixed, 1).to(dtype).unbind(2)


def _limits(x: Tensor, shares: Tensor, *rest: object) -> str | None:
    return None if len(shares) <= MOST else f"which makes at most {MOST} mixtures"


OP = Op("token_shift", reference=reference, torch=composed, gpu="kernels.token_shift.gpu.op:forward", limits=_limits)


def token_shift(
    x: Tensor, shares: Tensor, before: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return x_t + μ_i ⊙ (x_{t−1} − x_t) for each of the n rows of shares, in at least fp32 (RWKV, arXiv 2305.13048).

    Inside `recomputing()`, the backward pass recomputes the mixtures from x.

    Args:
        x: Input [B,T,D], with at least one token.
        shares: Shares μ of the previous token [n,D].
        before: The tokens before the first ones [N,D] (N = B without `cu_seqlens`); None for zeros.
        cu_seqlens: Boundaries [N+1] of documents packed into one row (B = 1), from 0 to T; documents may be empty.

    Returns:
        The n mixtures [B,T,D] in the dtype of x; under autocast in the dtype that the next layer would cast them to.

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """
    if x.dim() != 3 or not x.shape[1] or not x.is_floating_point():
        raise ValueError(f"x: expected a floating [B,T,D] with at least one token, got {x.dtype} {tuple(x.shape)}")
    if shares.dim() != 2 or shares.shape[1] != x.shape[2] or not len(shares):
        raise ValueError(f"shares: expected [n,{x.shape[2]}], got shape {tuple(shares.shape)}")
    if cu_seqlens is not None and not torch.compiler.is_compiling():
        documents(cu_seqlens, x.shape[1], len(x), x.device)
    sequences = len(x) if cu_seqlens is None else len(cu_seqlens) - 1
    if before is not None and before.shape != (sequences, x.shape[2]):
        raise ValueError(f"before: expected {[sequences, x.shape[2]]}, got shape {tuple(before.shape)}")
    args = (x, shares, before, cu_seqlens, dtype_of(x))
    run = OP.choose(x, *args) if plain((x, shares, before)) else composed
    mixtures: tuple[Tensor, ...] = run(*args)
    return tuple(remake(y, _mixture, i, run, *args) for i, y in enumerate(mixtures))


def _mixture(i: int, run: Callable[..., tuple[Tensor, ...]], x: Tensor, shares: Tensor, *rest: object) -> Tensor:
    """The i-th mixture alone."""
    return run(x, shares[i : i + 1], *rest)[0]
