"""Uninitialised memory for kernels. Each op's module imports `new` by name, so that its tests can poison the memory."""

import torch
from torch import Tensor


def new(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised contiguous tensor of the given shape, or (which is faster) of the shape of `like`."""
    if not shape:
        return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)


def aligned(x: Tensor) -> Tensor:
    """x, cloned if it is not 16-byte aligned, as kernels in Gluon need it."""
    return x if x.data_ptr() % 16 == 0 else x.clone()
