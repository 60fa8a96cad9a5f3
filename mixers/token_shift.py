"""The token before each token, over documents, states and parts of a sequence."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.core.documents import places

from .context_parallel import ContextParallel


def previous(
    x: Tensor,
    history: Tensor | None,
    cu_seqlens: Tensor | None = None,
    context_parallel: ContextParallel | None = None,
) -> tuple[Tensor, Tensor]:
    """x_{t−1} for each x_t, and the last token of each sequence.

    Args:
        x: A stream [B,T,C].
        history: The token before the first one [N,1,C] (N = B without `cu_seqlens`); None for 0.
        cu_seqlens: Boundaries [N+1] of packed documents, or None.
        context_parallel: Which part of each sequence x is; None if x holds whole sequences.

    Returns:
        The earlier tokens [B,T,C], and the history for the next call [N,1,C].
    """
    if context_parallel is not None:
        context_parallel.check(history, cu_seqlens)
        history = context_parallel.history(x, 1)
    if cu_seqlens is None:
        before = torch.zeros_like(x[:, :1]) if history is None else history.to(x.dtype)
        longer = torch.cat([before, x], 1)
        return longer[:, :-1], longer[:, -1:].clone()
    owner, place = places(cu_seqlens, x.shape[1])
    if history is None:
        history = x.new_zeros(len(cu_seqlens) - 1, 1, x.shape[2])
    first = history.to(x.dtype)[owner, 0]
    shifted = torch.where((place == 0)[:, None], first, F.pad(x[0], (0, 0, 1, 0))[:-1])
    last = x[0, (cu_seqlens[1:].long() - 1).clamp(min=0)]
    some = cu_seqlens.diff() > 0
    return shifted[None], torch.where(some[:, None], last, history[:, 0].to(x.dtype))[:, None]
