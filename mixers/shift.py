"""Streams shifted by one token, within each sequence or document."""

from typing import Any

import torch
from torch import Tensor

import kernels
from kernels import UserError
from kernels.core.backend import backend_name
from kernels.core.recompute import remake
from kernels.token_shift import moved, previous_tokens

from .context_parallel import ContextParallel


def sequences(x: Tensor, cu_seqlens: Tensor | None) -> int:
    """The number N of sequences of a stream [B,T,…]: its rows, or the documents in its row."""
    return len(x) if cu_seqlens is None else len(cu_seqlens) - 1


def check_sequences(state: Tensor | None, x: Tensor, cu_seqlens: Tensor | None) -> None:
    """Raise a UserError if a state [N,…] has another number of sequences than a stream [B,T,…]."""
    count = sequences(x, cu_seqlens)
    if state is not None and len(state) != count:
        where = f"x has {count}" if cu_seqlens is None else f"there are {count} documents"
        raise UserError(f"state: has {len(state)} sequences, but {where}")


def last_tokens(x: Tensor, before: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The last token [N,…] of each sequence of x [B,T,…], in the dtype of `before` [N,…], which fills empty ones."""
    if cu_seqlens is None:
        return x[:, -1].to(before.dtype, copy=True)  # a view would keep all of x
    ends = x[0, (cu_seqlens[1:] - 1).clamp(min=0).long()].to(before.dtype)
    return torch.where((cu_seqlens.diff() == 0).view(-1, *[1] * (x.dim() - 2)), before, ends)


def continued(
    x: Tensor, before: Tensor | None, cu_seqlens: Tensor | None, context_parallel: ContextParallel | None
) -> tuple[Tensor, Tensor | None]:
    """A stream [B,T,…], to be used in place of x, and the tokens before it [N,…]: `before`, or those of earlier parts.

    Raises:
        UserError: x has no tokens, or `before` another number of sequences.
    """
    if not x.shape[1]:
        raise UserError(f"x: shape {tuple(x.shape)} has no tokens; at least one token is needed")
    check_sequences(before, x, cu_seqlens)
    if context_parallel is None:
        return x, before
    context_parallel.check(before, cu_seqlens)
    (flat,), (first,) = context_parallel.histories([x.flatten(2)], [1])
    return flat.view(x.shape), None if first is None else first.view(-1, *x.shape[2:])


def shifted(
    x: Tensor,
    before: Tensor | None,
    cu_seqlens: Tensor | None,
    context_parallel: ContextParallel | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The previous token of each token, and the last token of each sequence.

    Args:
        x: A stream [B,T,…].
        before: The tokens before the first ones [N,…] (N from `sequences`); None for zeros.
        cu_seqlens: Boundaries [N+1] of packed documents, or None.
        context_parallel: Which part of each sequence x is; None if x holds whole sequences.

    Returns:
        The stream of previous tokens, shaped as x, and the last tokens [N,…]: those of `before` where a document is
        empty, and None without `before`.

    Raises:
        UserError: As from `continued`.
    """
    x, first = continued(x, before, cu_seqlens, context_parallel)
    return previous_tokens(x, first, cu_seqlens), None if before is None else last_tokens(x, before, cu_seqlens)


def recomputed_shift(
    x: Tensor, before: Tensor | None, cu_seqlens: Tensor | None, context_parallel: ContextParallel | None
) -> tuple[Tensor, Tensor | None]:
    """`shifted`, whose result is recomputed in the backward pass unless that would communicate."""
    previous, last = shifted(x, before, cu_seqlens, context_parallel)
    if context_parallel is None:
        previous = remake(previous, lambda *args: shifted(*args)[0], x, before, cu_seqlens)
    return previous, last


def shifted_beside(
    x: Tensor, before: Tensor | None, cu_seqlens: Tensor | None, context_parallel: ContextParallel | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Like `recomputed_shift`, with x between the results, to be used in place of x: one pass adds both gradients."""
    plain = before is None and cu_seqlens is None and context_parallel is None
    # neither a compiler nor all kinds of derivatives, which the reference has, can pass through `_Beside`
    if not plain or torch.compiler.is_compiling() or backend_name() == "reference":
        previous, last = recomputed_shift(x, before, cu_seqlens, context_parallel)
        return previous, x, last
    previous, x = _Beside.apply(x)
    return remake(previous, moved, x), x, None


class _Beside(torch.autograd.Function):
    """The previous tokens of whole sequences [B,T,…], and the tokens themselves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return moved(x), x.view_as(x)

    @staticmethod
    def backward(ctx: Any, of_previous: Tensor, of_x: Tensor) -> Tensor:
        if torch.is_grad_enabled():  # to be differentiated again
            return of_x + torch.cat([of_previous[:, 1:], torch.zeros_like(of_previous[:, :1])], 1)
        total = torch.empty_like(of_x)
        torch.add(of_x[:, :-1], of_previous[:, 1:], out=total[:, :-1])
        total[:, -1] = of_x[:, -1]
        return total


def mixed_with_previous(
    x: Tensor,
    shares: Tensor,
    before: Tensor | None,
    cu_seqlens: Tensor | None,
    context_parallel: ContextParallel | None = None,
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """The mixtures of `kernels.token_shift` of a stream [B,T,D] by shares [n,D], and its last tokens, as in `shifted`.

    The other arguments and the errors are those of `shifted`.
    """
    x, first = continued(x, before, cu_seqlens, context_parallel)
    mixtures = kernels.token_shift(x, shares, first, cu_seqlens)
    return mixtures, None if before is None else last_tokens(x, before, cu_seqlens)
