"""Uninitialised memory for kernels. Each op's module imports `new` by name, so that its tests can poison the memory."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def new(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised contiguous tensor of the given shape, or (which is faster) of the shape of `like`."""
    if not shape:
        return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)


def gradients_like(xs: Sequence[Tensor]) -> list[Tensor]:
    """Uninitialised tensors for the gradients of xs [B,T,…], laid out as they are.

    Those that are columns of one tensor become columns of one new tensor [B,T,columns]. The others are contiguous.
    """
    (B, T), row = xs[0].shape[:2], xs[0].stride(1)
    memory = xs[0].untyped_storage().data_ptr()
    whole: Tensor | None = None
    made = []
    for x in xs:
        column, width = x.storage_offset() % row, math.prod(x.shape[2:])
        same = x.shape[:2] == (B, T) and x.untyped_storage().data_ptr() == memory and x.dtype == xs[0].dtype
        if not (same and column + width <= row and lies(x, [T * row, row, *contiguous_strides(x.shape[2:])])):
            made.append(new(x))
            continue
        whole = new(x, B, T, row) if whole is None else whole
        made.append(whole[..., column : column + width].view(x.shape))
    return made


def lies(x: Tensor, strides: Sequence[int]) -> bool:
    """Return whether x has these strides, along the axes that have more than one entry."""
    return all(step == wanted or size == 1 for size, step, wanted in zip(x.shape, x.stride(), strides, strict=True))


def contiguous_strides(shape: Sequence[int]) -> list[int]:
    """The strides of a contiguous tensor."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def aligned(x: Tensor) -> Tensor:
    """x, cloned if it is not 16-byte aligned, as kernels in Gluon need it."""
    return x if x.data_ptr() % 16 == 0 else x.clone()
