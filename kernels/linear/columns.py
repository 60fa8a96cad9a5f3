"""Columns of a product. If their gradients are adjacent in memory, they are its gradient without a copy."""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..core.autograd import plain
from ..core.backend import backend_name, loaded

LARGE = 2**22  # numbers from which on parts are copied one by one


def split_columns(y: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
    """`y.split(widths, -1)`. The backward pass concatenates the gradients, unless they already are columns of a tensor.

    Args:
        y: […,N].
        widths: Numbers of columns, N in total.

    Returns:
        Views […,width] of y.
    """
    if plain((y,)) and y.requires_grad and torch.is_grad_enabled() and _on_gpu(y):
        parts: tuple[Tensor, ...] = _Split.apply(y, widths)
        return parts
    return y.split(list(widths), -1)


def columns_of(xs: Sequence[Tensor], rows: int) -> list[int] | None:
    """Return the first column of each tensor in the one tensor that they are all columns of; None if there is none.

    They have to be all of its columns, without overlaps, and it has to be contiguous.

    Args:
        xs: Tensors that share their first axes. The entries along all other axes are columns.
        rows: Number of these first axes.
    """
    shape, widths = xs[0].shape[:rows], [math.prod(x.shape[rows:]) for x in xs]
    strides = contiguous_strides((*shape, sum(widths)))[:rows]
    memory, start = xs[0].untyped_storage().data_ptr(), min(x.storage_offset() for x in xs)
    for x in xs:
        same = x.shape[:rows] == shape and x.dtype == xs[0].dtype and x.untyped_storage().data_ptr() == memory
        if not same or not has_strides(x, (*strides, *contiguous_strides(x.shape[rows:]))):
            return None
    columns = [int(x.storage_offset() - start) for x in xs]
    end = 0
    for column, width in sorted(zip(columns, widths, strict=True)):
        if column != end:  # a gap, or a column that belongs to two tensors
            return None
        end += width
    return columns


def has_strides(x: Tensor, strides: Sequence[int]) -> bool:
    """Return whether x has these strides, along the axes with more than one entry."""
    return all(step == wanted or size == 1 for size, step, wanted in zip(x.shape, x.stride(), strides, strict=True))


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _on_gpu(y: Tensor) -> bool:
    """Return whether ops for GPUs may follow, which can write gradients into the columns of a tensor."""
    return backend_name() == "triton" or (backend_name() == "auto" and y.is_cuda)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
        ctx.starts = [0, *accumulate(widths)][:-1]
        return y.split(list(widths), -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        first = gradients[0]
        if torch.is_grad_enabled():  # which can be differentiated again
            return torch.cat(gradients, -1), None
        shape = (*first.shape[:-1], sum(g.shape[-1] for g in gradients))
        if columns_of(gradients, first.dim() - 1) == ctx.starts:
            return first.as_strided(shape, contiguous_strides(shape)), None
        if not first.is_cuda or math.prod(shape) < LARGE or any(g.dtype != first.dtype for g in gradients):
            return torch.cat(gradients, -1), None
        joined = first.new_empty(shape)
        copy = loaded("kernels.gpu.rows:copy_rows")  # PyTorch moves few bytes at a time
        for place, gradient in zip(joined.split([g.shape[-1] for g in gradients], -1), gradients, strict=True):
            copy(gradient, place)
        return joined, None
