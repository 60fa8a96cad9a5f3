"""What follows from the sizes of a call alone: made once for calls that are alike, so that the host is quick."""

from collections.abc import Callable, Hashable
from functools import lru_cache, wraps
from typing import Any, Self, TypeVar, TypeVarTuple

import torch
from torch import Tensor

from ..documents import Documents, documents
from . import launch_file
from .enqueue import Prepared

SomePlan = TypeVar("SomePlan", bound="Plan")
Options = TypeVarTuple("Options")


class Plan:
    """Sizes, the layout of chunks and segments, and launches of which only the tensors are missing.

    Plans and launches are remembered by all of the arguments that they are made of, and are made of nothing else: no
    key is listed by hand, and none can be forgotten.

    Args:
        packed: The documents that are packed into one row, if any are.
        dtype: Of new tensors.
        device: Where they lie.
    """

    def __init__(self, packed: Documents | None, dtype: torch.dtype, device: torch.device):
        self.packed, self.dtype, self.device = packed, dtype, device
        self.launches: dict[Hashable, Prepared] = {}

    @classmethod
    def of(cls, cu_seqlens: Tensor | None, length: int, *sizes: Hashable) -> Self:
        """The plan of these sizes, which are hashable; documents keep those of their packing.

        Args:
            cu_seqlens: Boundaries of packed documents.
            length: Tokens of a row.
            sizes: All other arguments of the plan after `packed`.
        """
        plan: Callable[..., Self] = cls
        if cu_seqlens is None:
            return of_rows(launch_file.current(), plan, sizes)
        return documents(cu_seqlens, length).once(of_documents, launch_file.current(), plan, sizes)

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor that a kernel will fill."""
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)


@lru_cache(maxsize=256)
def of_rows(file: str | None, plan: Callable[..., SomePlan], sizes: tuple[Any, ...]) -> SomePlan:
    """The plan of rows of a batch, while launches come from this file."""
    return plan(None, *sizes)


def of_documents(
    packed: Documents, file: str | None, plan: Callable[..., SomePlan], sizes: tuple[Any, ...]
) -> SomePlan:
    """The same of packed documents."""
    return plan(packed, *sizes)


def prepared(make: Callable[[SomePlan, *Options], Prepared]) -> Callable[[SomePlan, *Options], Prepared]:
    """A launch of a plan, prepared the first time that it is wanted with these arguments.

    All that the kernel is compiled for comes from the plan, which does not change, and from the arguments. Which
    tensors are missing is what a prepared launch sees for itself.
    """

    @wraps(make)
    def launch(plan: SomePlan, *options: *Options) -> Prepared:
        key = (make, *options)
        found = plan.launches.get(key)
        if found is None:
            found = plan.launches[key] = make(plan, *options)
        return found

    return launch
