"""Input gate tied to the forget gate: 1 − exp(log_decay)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.autograd import Gradients, register
from ..core.recompute import remake


class Arguments(NamedTuple):
    """Arguments of the op."""

    log_decay: Tensor
    dtype: torch.dtype  # of the result


def compute(args: Arguments) -> tuple[Tensor]:
    """1 − exp(log_decay)."""
    return (torch.expm1(args.log_decay).neg_().to(args.dtype).contiguous(),)


def fake(args: Arguments) -> tuple[Tensor]:
    """An empty tensor of the shape and dtype that `compute` returns."""
    return (args.log_decay.new_empty(args.log_decay.shape, dtype=args.dtype),)


def differentiate(
    gradients: Sequence[Tensor | None], residuals: Sequence[Tensor], needed: Any, args: Arguments
) -> Gradients:
    """The gradient of log_decay."""
    assert gradients[0] is not None
    return {"log_decay": torch.exp(args.log_decay).neg_().mul_(gradients[0]).contiguous()}


apply = register("complement", compute, differentiate, fake)


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
    return remake(k, lambda *args: compute(Arguments(*args))[0], log_decay, dtype)
