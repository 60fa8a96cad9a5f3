"""Uninitialised memory for kernels, which tests fill with NaN."""

import torch
from torch import Tensor

# Kernels in Gluon copy 16 bytes at a time, so they need aligned addresses, and strides that the compiler knows to be
# divisible: by 8 elements in half precision if it is a constant of the kernel, otherwise by 16, all that it looks for.
CONSTANT_STRIDES, OTHER_STRIDES = 8, 16


def new(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised contiguous tensor of the given shape, or (which is faster) of the shape of `like`."""
    if not shape:
        return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)


def aligned(x: Tensor) -> Tensor:
    """x, copied with its strides if it is not 16-byte aligned, as kernels in Gluon need it."""
    if x.data_ptr() % 16 == 0:
        return x
    end = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    # `clone` drops gaps between rows, but kernels already have the strides
    return x.as_strided((end,), (1,)).clone().as_strided(x.shape, x.stride())
