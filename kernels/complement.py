"""Input gate tied to the forget gate: 1 − exp(log_decay)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from . import op
from .recompute import remake


def compute(log_decay: Tensor, dtype: torch.dtype) -> tuple[Tensor]:
    """1 − exp(log_decay) in a dtype."""
    return (torch.expm1(log_decay).neg_().to(dtype).contiguous(),)


def fake(log_decay: Tensor, dtype: torch.dtype) -> tuple[Tensor]:
    """An empty tensor of the shape and dtype that `compute` returns."""
    return (log_decay.new_empty(log_decay.shape, dtype=dtype),)


def differentiate(
    gradients: Sequence[Tensor | None],
    residuals: Sequence[Tensor],
    needed: Sequence[bool],
    log_decay: Tensor,
    dtype: torch.dtype,
) -> list[Tensor | None]:
    """The gradient of log_decay."""
    assert gradients[0] is not None
    return [torch.exp(log_decay).neg_().mul_(gradients[0]).contiguous()]


apply = op.register("complement", compute, differentiate, fake, results=1)


def again(log_decay: Tensor, dtype: torch.dtype) -> Tensor:
    """1 − exp(log_decay), without gradients."""
    return compute(log_decay, dtype)[0]


def complement(log_decay: Tensor, dtype: torch.dtype) -> Tensor:
    """1 − exp(log_decay), accurate where little is forgotten.

    Inside `recomputing()` the result is not saved by what follows.

    Args:
        log_decay: Of any shape, ≤ 0.
        dtype: Dtype of the result.

    Returns:
        The input gates, in the shape of `log_decay`.
    """
    (k,) = apply(log_decay, dtype)
    return remake(k, again, log_decay, dtype)
