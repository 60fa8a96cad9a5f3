"""`expanded`: a tensor repeated along axes, whose gradient in deterministic mode does not depend on the batch.

Autograd sums the gradient over these axes. On a GPU the order of PyTorch's sums depends on how many sums there are, and
so on the size of the batch. In deterministic mode they are pairwise sums, whose order depends on their length alone.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .deterministic import is_deterministic


def expanded(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return `x.expand(shape)`, where x has as many axes as `shape`."""
    if not is_deterministic() or not x.requires_grad:
        return x.expand(shape)
    y: Tensor = _Expanded.apply(x, tuple(shape))
    return y


class _Expanded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        ctx.axes = [axis for axis, (size, new) in enumerate(zip(x.shape, shape, strict=True)) if size == 1 < new]
        return x.expand(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        for axis in ctx.axes:
            dy = _pairwise_sum(dy, axis)
        return dy, None


def _pairwise_sum(x: Tensor, axis: int) -> Tensor:
    """Sum x along an axis, which stays with length 1, by adding its halves."""
    while (length := x.shape[axis]) > 1:
        half = length // 2
        total = x.narrow(axis, 0, half) + x.narrow(axis, half, half)
        x = torch.cat([total, x.narrow(axis, 2 * half, 1)], axis) if length % 2 else total
    return x
