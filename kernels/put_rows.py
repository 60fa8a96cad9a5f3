"""Rows that are written into several larger tensors in one launch."""

from collections.abc import Sequence

from torch import Tensor

from .core.backend import Op


def one_by_one(rows: Sequence[Tensor], memories: Sequence[Tensor], at: Tensor) -> None:
    """Write them in PyTorch, which takes a launch for each tensor."""
    for x, memory in zip(rows, memories, strict=True):
        memory.index_copy_(0, at, x)


OP = Op("put_rows", reference=one_by_one, torch=one_by_one, gpu="kernels.gpu.rows:put_rows")


def put_rows(rows: Sequence[Tensor], memories: Sequence[Tensor], at: Tensor) -> None:
    """Write rows [B,C] of each tensor to the places `at` [B] int64 of a contiguous memory [N,C] of the same dtype."""
    if rows:
        OP.choose(rows[0])(rows, memories, at)
