"""A log decay of −inf erases the state before its token is written: a reset.

Sums of log decays cannot hold −inf, since −inf − (−inf) is not a number. They hold a finite number in its place, whose
exponential is exactly 0, and that is small enough to leave the digits of the sums around it. Nothing passes a reset in
either direction: its gradient and those of all tokens before it are 0, not what rounding leaves of sums that cancel.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .autograd import plain
from .deterministic import is_deterministic

# replacement for −inf where log decays are summed, by the dtype of the sums; those in fp64 serve results in fp64, too
LEAST = {torch.float64: -800.0, torch.float32: -110.0}
LEAST_ALONE = -1e20  # likewise where log decays are multiplied by rates, but no differences of sums are taken


def sums(log_decay: Tensor, dim: int, dtype: torch.dtype, *, least: float | None = None) -> Tensor:
    """log_decay summed along an axis, inclusive, in `dtype`; `least` replaces −inf, by default that of the dtype."""
    least = LEAST[dtype] if least is None else least
    readable = log_decay.is_cpu and log_decay.numel() > 0 and plain((log_decay,))
    resets = log_decay < least if readable and float(log_decay.detach().amin()) < least else None
    bounded = log_decay.clamp(min=least).to(dtype)  # whose gradient is 0 where it is bounded
    return cumulated(bounded, dim, is_deterministic()) if resets is None else _Sums.apply(bounded, resets, dim)


def cumulated(x: Tensor, dim: int, deterministic: bool) -> Tensor:
    """x summed along an axis, inclusive, in deterministic mode in an order that depends on the length alone.

    On a GPU the order of PyTorch's sums depends on how many sums there are.
    """
    if x.is_cpu or not deterministic:
        return x.cumsum(dim)
    step, size = 1, x.shape[dim]
    while step < size:
        later = x.narrow(dim, step, size - step) + x.narrow(dim, 0, size - step)
        x, step = torch.cat([x.narrow(dim, 0, step), later], dim), 2 * step
    return x


class _Sums(torch.autograd.Function):
    """`cumsum` whose gradients end at resets: what later tokens contribute only cancels, up to rounding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, resets: Tensor, dim: int) -> Tensor:
        ctx.save_for_backward(resets)
        ctx.dim = dim
        return x.cumsum(dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (resets,), dim = ctx.saved_tensors, ctx.dim
        size = gradient.shape[dim]
        shape = [size if i == dim % gradient.dim() else 1 for i in range(gradient.dim())]
        place = torch.arange(size, device=gradient.device).view(shape)
        to_end = gradient.flip(dim).cumsum(dim).flip(dim)
        reset = torch.where(resets, place, size)  # from each place on, the first one, then the first one after it
        reset = reset.flip(dim).cummin(dim).values.flip(dim)
        last = torch.full_like(reset.narrow(dim, 0, 1), size)
        after = torch.cat([reset.narrow(dim, 1, size - 1), last], dim)
        beyond = torch.cat([to_end, torch.zeros_like(to_end.narrow(dim, 0, 1))], dim).gather(dim, after)
        return to_end - beyond, None, None
