"""Streams shifted by one token, within each sequence or document."""

import torch
from torch import Tensor

from kernels import UserError
from kernels.core.documents import places

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


def last_tokens(x: Tensor, before: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The last token [N,…] of each sequence of x [B,T,…], in the dtype of `before` [N,…], which fills empty ones."""
    if cu_seqlens is None:
        return x[:, -1].to(before.dtype, copy=True)  # a view would keep all of x
    ends = x[0, (cu_seqlens[1:] - 1).clamp(min=0).long()].to(before.dtype)
    return torch.where((cu_seqlens.diff() == 0).view(-1, *[1] * (x.dim() - 2)), before, ends)


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
        UserError: x has no tokens, or `before` another number of sequences.
    """
    if not x.shape[1]:
        raise UserError(f"x: shape {tuple(x.shape)} has no tokens; at least one token is needed")
    check_sequences(before, x, cu_seqlens)
    if context_parallel is not None:
        context_parallel.check(before, cu_seqlens)
        (x,), (earlier,) = context_parallel.before([x], 1)
        previous = torch.cat([earlier if earlier.shape[1] else torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
        if cu_seqlens is not None:
            inner = cu_seqlens[1:-1].long()  # where documents begin within this part
            previous = previous.index_fill(1, inner, 0)
        return previous, None
    past = x.new_zeros(sequences(x, cu_seqlens), *x.shape[2:]) if before is None else before
    starts, first = starting(x, past, cu_seqlens)
    previous = torch.where(starts, first, x.roll(1, 1))
    return previous, None if before is None else last_tokens(x, before, cu_seqlens)
