"""Quantities that follow from the sizes of a call, computed once for all calls of these sizes to save host time."""

from collections.abc import Callable, Hashable, Iterable
from functools import lru_cache, wraps
from typing import Any, Self, TypeVar, TypeVarTuple

import torch
from torch import Tensor

from ..core.deterministic import is_deterministic
from ..core.documents import Documents, documents
from .launch import LaunchSpec
from .layout import Layout

SomePlan = TypeVar("SomePlan", bound="Plan")
Options = TypeVarTuple("Options")


class Plan:
    """Sizes, the layout of chunks and segments, and launches that lack only their tensors.

    Plans and launches are cached by all of their arguments, and by the mode of `deterministic`. They depend on nothing
    else: no key is listed by hand, so that none can be forgotten. A deterministic plan makes no choice that changes
    rounding by the number of sequences or of tokens, or by the number of multiprocessors.

    Args:
        dtype: Dtype of new tensors.
        device: Device of new tensors.
    """

    layout: Layout

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.dtype, self.device, self.deterministic = dtype, device, is_deterministic()
        self.launches: dict[Hashable, LaunchSpec] = {}

    def place(self, packed: Documents | None) -> None:
        """Set the layout: of rows, or of these documents, which must not be kept. Fake tensors need no layout.

        Only tables and answers of `reaches` may depend on where documents begin, and launches on their rounded number
        `room`: a plan of static documents serves others.
        """
        raise NotImplementedError

    @classmethod
    def of(cls, cu_seqlens: Tensor | None, length: int, *sizes: Hashable) -> Self:
        """The plan of these sizes, which are hashable; plans of packed documents are cached with the documents.

        Args:
            cu_seqlens: Boundaries [N+1] of packed documents, or None.
            length: Tokens per row.
            sizes: The arguments of the plan.
        """
        plan: Callable[..., Self] = cls
        if cu_seqlens is None:
            return of_rows(is_deterministic(), plan, sizes)
        return documents(cu_seqlens, length).plan(of_documents, is_deterministic(), plan, sizes)

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialised tensor for a kernel to fill."""
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def empty(self, shapes: Iterable[tuple[tuple[int, ...], torch.dtype] | None]) -> tuple[Tensor | None, ...]:
        """Return uninitialised tensors of these shapes and dtypes; None stays None."""
        return tuple(None if x is None else self.new(*x[0], dtype=x[1]) for x in shapes)


@lru_cache(maxsize=256)
def of_rows(mode: bool, plan: Callable[..., SomePlan], sizes: tuple[Any, ...]) -> SomePlan:
    """The plan of the rows of a batch, in this mode of `deterministic`."""
    made = plan(*sizes)
    made.place(None)
    return made


def of_documents(packed: Documents, mode: bool, plan: Callable[..., SomePlan], sizes: tuple[Any, ...]) -> SomePlan:
    """Return the plan of a call with packed documents."""
    made = plan(*sizes)
    made.place(packed)
    return made


def prepared(make: Callable[[SomePlan, *Options], LaunchSpec]) -> Callable[[SomePlan, *Options], LaunchSpec]:
    """Cache a launch of a plan, which is prepared on the first call with these arguments.

    Everything that the kernel is compiled for comes from the plan, which does not change, and from the arguments. Which
    tensors are missing is left to the prepared launch.
    """

    @wraps(make)
    def launch(plan: SomePlan, *options: *Options) -> LaunchSpec:
        key = (make, *options)
        cached = plan.launches.get(key)
        if cached is None:
            cached = plan.launches[key] = make(plan, *options)
        return cached

    return launch
