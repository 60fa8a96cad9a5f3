"""Packed documents of a CUDA graph: static boundaries and tables that are filled before each replay.

A graph fixes the sizes of its launches and the addresses of its tensors. So the boundaries are padded with empty
documents until their number is a power of two, and each table to the largest number of rows that so many documents can
have. Rows of padding hold no tokens, and what kernels compute for them is never read.

A launch that depends on the longest document asks `Documents.reaches`, and the answer becomes a property of the graph.
The graph serves all documents that give the same answers. Its results are bitwise equal to those of calls with the
documents' own boundaries.
"""

import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from .documents import Documents, Made, SomeTables, documents, moved, remember, rounded


class StaticDocuments(Documents):
    """Documents whose boundaries and tables stay at the same addresses.

    Args:
        cu_seqlens: Memory for boundaries [N+1]; the constructor fills it.
        present: The first documents, at most N.
    """

    bounded = True

    def __init__(self, cu_seqlens: Tensor, present: Documents):
        self.device, self._row = cu_seqlens.device, present.length
        self._cu_seqlens = weakref.ref(cu_seqlens)  # weak: `remember` keeps self as long as the boundaries
        self._room, self._present = len(cu_seqlens) - 1, present
        self._made: dict[Hashable, Any] = {}  # valid for the present documents
        self._plans: dict[Hashable, Any] = {}
        self._tables: dict[tuple[Any, ...], Any] = {}
        self._answers: dict[int, bool] = {}  # of `reaches`, by number of tokens
        self._longest_bound: int | None = None
        self._hold(present)

    def fits(self, others: Documents) -> bool:
        """Return whether a graph that reads these tables gives the results of calls with the other documents."""
        alike = others.length == self._row and rounded(len(others.spans)) == self._room
        return alike and all((others.longest >= tokens) == answer for tokens, answer in self._answers.items())

    def fill(self, present: Documents) -> None:
        """Switch to documents that fit, without waiting for the device."""
        if present is self._present:
            return
        self._hold(present)
        for (make, *arguments), tables in self._tables.items():
            # in order of creation, so nested tables come first
            torch._foreach_copy_(list(tables.tensors()), list(make(self, *arguments).tensors()))

    def _hold(self, present: Documents) -> None:
        self._present = present
        self._made.clear()
        self._bounds = present.bounds + [self._row] * (self._room + 1 - len(present.bounds))
        cu_seqlens = self._cu_seqlens()
        assert cu_seqlens is not None
        cu_seqlens.copy_(moved(torch.tensor(self._bounds, dtype=cu_seqlens.dtype), self.device))

    @property
    def bounds(self) -> list[int]:
        """The present boundaries, padded, on the host.

        Raises:
            RuntimeError: A graph is being captured; all its replays would use the present boundaries.
        """
        if capturing(self.device):
            raise RuntimeError("the boundaries of packed documents are read on the host")
        return self._bounds

    @property
    def length(self) -> int:
        return self._row

    def reaches(self, tokens: int) -> bool:
        return self._answers.setdefault(tokens, self._present.longest >= tokens)

    def longest_bound(self) -> int:
        if self._longest_bound is None:
            self._longest_bound = min(self._row, rounded(self._present.longest))
            self._answers[self._longest_bound + 1] = False
        return self._longest_bound

    def once(self, make: Callable[..., Made], *arguments: Any) -> Made:
        if capturing(self.device):
            raise RuntimeError("packed documents are laid out on the host")
        return super().once(make, *arguments)

    def tables(self, make: Callable[..., SomeTables], *arguments: Any) -> SomeTables:
        key = (make, *arguments)
        if key not in self._tables:
            self._tables[key] = make(self, *arguments)
        tables: SomeTables = self._tables[key]
        return tables

    def plan(self, make: Callable[..., Made], *arguments: Any) -> Made:
        key = (make, *arguments)
        if key not in self._plans:
            self._plans[key] = make(self, *arguments)
        plan: Made = self._plans[key]
        return plan


def static_copy(cu_seqlens: Tensor, length: int) -> Tensor:
    """Return padded boundaries that a graph can read; `StaticDocuments.fill` replaces their contents."""
    present = documents(cu_seqlens, length)
    static = cu_seqlens.new_empty(rounded(len(present.spans)) + 1)
    remember(static, StaticDocuments(static, present))
    return static


def static_documents(cu_seqlens: Tensor, length: int) -> StaticDocuments:
    """Return the documents of boundaries made by `static_copy`."""
    packed = documents(cu_seqlens, length)
    assert isinstance(packed, StaticDocuments)
    return packed


def capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
