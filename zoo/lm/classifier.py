"""A head that classifies sequences."""

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from kernels import UserError
from kernels.documents import places

Pooling = Literal["mean", "last"]


class Classifier(nn.Linear):
    """One prediction per sequence: its outputs, pooled, and a linear map without bias. Subclass it to pool otherwise.

    Args:
        hidden_size: Size of the residual stream.
        num_classes: Number of classes.
        pooling: `mean` of all positions, or the `last` one.

    Raises:
        UserError: An argument is out of range.
    """

    def __init__(self, hidden_size: int, num_classes: int = 10, pooling: Pooling = "mean"):
        if num_classes < 2:
            raise UserError(f"num_classes: {num_classes} must be at least 2")
        if pooling not in get_args(Pooling):
            raise UserError(f"pooling: {pooling!r} is not one of {', '.join(get_args(Pooling))}")
        super().__init__(hidden_size, num_classes, bias=False)
        self.pooling = pooling

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return self.out_features

    def pool(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Outputs of the blocks x [B,T,hidden] → one vector per sequence.

        Args:
            x: [B,T,hidden].
            cu_seqlens: Boundaries [N+1] of sequences packed into one row (B = 1); none may be empty.

        Returns:
            [B,1,hidden], or [1,N,hidden] of packed sequences.
        """
        if cu_seqlens is None:
            return x.mean(1, keepdim=True) if self.pooling == "mean" else x[:, -1:]
        if self.pooling == "last":
            return x[:, cu_seqlens[1:] - 1]
        owner, _ = places(cu_seqlens, x.shape[1])
        sums = x.new_zeros(1, len(cu_seqlens) - 1, x.shape[-1], dtype=torch.float32).index_add(1, owner, x.float())
        return (sums / cu_seqlens.diff()[:, None]).to(x.dtype)
