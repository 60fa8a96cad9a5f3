"""A head that classifies sequences."""

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from kernels import UserError, at_least_fp32, is_deterministic
from kernels.core.documents import documents, places
from mixers.arguments import check_sizes
from mixers.projection import Linear

Pooling = Literal["mean", "last"]


class Classifier(Linear):
    """One prediction per sequence: its outputs, pooled, and a linear map without bias. Subclass it to pool otherwise.

    Args:
        hidden_size: Size of the residual stream.
        num_classes: Number of classes.
        pooling: `mean` of all positions, or the `last` one.

    Raises:
        UserError: An argument is out of range.
    """

    def __init__(self, hidden_size: int, num_classes: int = 10, pooling: Pooling = "mean"):
        check_sizes({"hidden_size": hidden_size})
        check_sizes({"num_classes": num_classes}, least=2)
        if pooling not in get_args(Pooling):
            raise UserError(f"pooling: {pooling!r} is not one of {', '.join(get_args(Pooling))}")
        super().__init__(hidden_size, num_classes, bias=False)
        self.pooling = pooling

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return self.out_features

    def pool(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Outputs of the blocks x [B,T,hidden] → one vector per sequence, [B,1,hidden].

        Of documents packed by `cu_seqlens` [N+1], none of them empty, they are [1,N,hidden].
        """
        if self.pooling == "mean" and is_deterministic():  # one by one: another order of sums for each number of them
            spans = [(0, x.shape[1])] if cu_seqlens is None else documents(cu_seqlens, x.shape[1]).spans
            rows = [row[start:stop].mean(0) for row in x for start, stop in spans]
            return torch.stack(rows).unflatten(0, (len(x), -1))
        if cu_seqlens is None:
            return x.mean(1, keepdim=True) if self.pooling == "mean" else x[:, -1:]
        if self.pooling == "last":
            return x[:, cu_seqlens[1:] - 1]
        owner, _ = places(cu_seqlens, x.shape[1])
        lengths, exact = cu_seqlens.diff(), at_least_fp32(x)
        sums = exact.new_zeros(1, len(lengths), x.shape[-1]).index_add(1, owner, exact)
        return (sums / lengths[:, None]).to(x.dtype)


def check_predicts_tokens(model: nn.Module, what: str) -> None:
    """Raise a UserError that begins with `what` if a model classifies sequences, and so has no next token."""
    if isinstance(head := getattr(model, "head", None), Classifier):
        raise UserError(f"{what}: a model with the head {type(head).__name__} labels sequences and predicts no tokens")
