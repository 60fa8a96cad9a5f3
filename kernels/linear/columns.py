"""Columns of a product. Their gradients become that of the product without a copy if they lie side by side."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.allocation import contiguous_strides, lies
from ..core.autograd import once, plain


def split_columns(y: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
    """`y.split(widths, -1)`. The backward pass concatenates the gradients only if they are not parts of one tensor.

    Args:
        y: […,N].
        widths: Numbers of columns, N in total.

    Returns:
        Views […,width] of y.
    """
    if plain((y,)) and torch.is_grad_enabled() and y.requires_grad:
        parts: tuple[Tensor, ...] = _Split.apply(y, widths)
        return parts
    return y.split(list(widths), -1)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
        ctx.widths = widths
        return y.split(list(widths), -1)

    @staticmethod
    def _joined(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        whole = _whole(gradients, ctx.widths)
        return torch.cat(gradients, -1) if whole is None else whole, None

    backward = staticmethod(once(_joined))


def _whole(parts: Sequence[Tensor], widths: Sequence[int]) -> Tensor | None:
    """The contiguous tensor that consists of the parts; None if there is none."""
    first, at = parts[0], parts[0].storage_offset()
    shape, memory = (*first.shape[:-1], sum(widths)), first.untyped_storage().data_ptr()
    strides = contiguous_strides(shape)
    for part, width in zip(parts, widths, strict=True):
        if part.untyped_storage().data_ptr() != memory or part.storage_offset() != at or not lies(part, strides):
            return None
        at += width
    return first.as_strided(shape, strides)
