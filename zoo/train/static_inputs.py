"""Inputs of CUDA graphs: memory that all replays for one shape read."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kernels.core.documents import Documents, documents
from kernels.core.static_documents import StaticDocuments, static_copy, static_documents

Compute = Callable[..., tuple[Tensor, ...]]
Shape = tuple[tuple[torch.Size, torch.dtype], ...]  # shapes and dtypes of the inputs
# Each shape costs an eager step, two captures, a replay and the memory of its graphs. Tasks of a few lengths have fewer
# shapes than this. With arbitrary lengths, most steps of a run would be captures, and replays would be rare.
MOST_SHAPES = 8


class StaticInputs(NamedTuple):
    """Memory that the graphs for inputs of one shape read.

    Attributes:
        inputs: The inputs.
        cu_seqlens: Boundaries of packed documents, from `static_copy`; None without documents.
    """

    inputs: tuple[Tensor, ...]
    cu_seqlens: Tensor | None

    @classmethod
    def copied(cls, inputs: tuple[Tensor, ...], cu_seqlens: Tensor | None, parts: int = 1) -> "StaticInputs":
        """Return copies of the inputs, and a padded copy of the boundaries for so many processes that share the row."""
        copies = tuple(x.detach().clone() for x in inputs)
        return cls(copies, None if cu_seqlens is None else static_copy(cu_seqlens, inputs[0].shape[1], parts))

    @property
    def documents(self) -> StaticDocuments | None:
        return None if self.cu_seqlens is None else static_documents(self.cu_seqlens, self.inputs[0].shape[1])

    def serve(self, inputs: tuple[Tensor, ...], packed: Documents | None) -> bool:
        """Return whether the graphs compute the step of these inputs and documents."""
        return fit(shape_of(self.inputs), self.documents, inputs, packed)

    def fill(self, inputs: tuple[Tensor, ...], packed: Documents | None) -> None:
        """Copy inputs and documents to where the graphs read them."""
        for static, x in zip(self.inputs, inputs, strict=True):
            static.copy_(x)
        if (own := self.documents) is not None and packed is not None:
            own.fill(packed)


def fit(shape: Shape, static: StaticDocuments | None, inputs: tuple[Tensor, ...], packed: Documents | None) -> bool:
    """Return whether inputs and documents have this shape."""
    alike = packed is None if static is None else packed is not None and static.fits(packed)
    return alike and shape == shape_of(inputs)


def shape_of(inputs: Iterable[Tensor]) -> Shape:
    return tuple((x.shape, x.dtype) for x in inputs)


def packed_documents(inputs: tuple[Tensor, ...], cu_seqlens: Tensor | None) -> Documents | None:
    """Return the documents that are packed into the first input; None if there are none."""
    return None if cu_seqlens is None else documents(cu_seqlens, inputs[0].shape[1], len(inputs[0]))


def eager(compute: Compute, inputs: tuple[Tensor, ...], cu_seqlens: Tensor | None) -> tuple[Tensor, ...]:
    """Call a function of inputs, and of boundaries if documents are packed."""
    return compute(*inputs) if cu_seqlens is None else compute(*inputs, cu_seqlens=cu_seqlens)


def addresses(parameters: Iterable[nn.Parameter]) -> list[tuple[int, bool]]:
    """Return where each parameter is, and whether it is trained: graphs are valid as long as neither changes."""
    return [(parameter.data_ptr(), parameter.requires_grad) for parameter in parameters]
