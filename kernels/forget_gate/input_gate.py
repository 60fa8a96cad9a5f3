"""Input gate tied to the forget gate: 1 − exp(log_decay)."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.allocation import new
from ..core.autograd import Gradients, register
from ..core.recompute import remake


class Arguments(NamedTuple):
    log_decay: Tensor
    dtype: torch.dtype  # of the result


def _compute(args: Arguments) -> tuple[Tensor]:
    return (torch.expm1(args.log_decay).neg_().to(args.dtype).contiguous(),)


def _differentiate(args: Arguments, needed: Any, dy: Tensor) -> Gradients:
    return {"log_decay": torch.exp(args.log_decay).neg_().mul_(dy).contiguous()}


apply = register("complement", _compute, _differentiate, lambda args: (new(args.log_decay, dtype=args.dtype),))


def complement(log_decay: Tensor, dtype: torch.dtype) -> Tensor:
    """1 − exp(log_decay), accurate where little is forgotten.

    Inside `recomputing()` the result is not saved by what follows.

    Args:
        log_decay: Of any shape, ≤ 0.
        dtype: Dtype of the result.

    Returns:
        The input gates, in the shape of `log_decay`.
    """
    k = apply(log_decay, dtype)
    return remake(k, lambda *args: _compute(Arguments(*args))[0], log_decay, dtype)
