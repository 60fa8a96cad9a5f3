"""Memory that kernels fill. Each op's module asks here under a name of its own, so that its tests can poison it."""

import torch
from torch import Tensor


def new(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """A contiguous tensor that a kernel will fill: of this shape, or of that of `like`, which is quicker."""
    if not shape:
        return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)
