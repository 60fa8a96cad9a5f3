"""Packed documents of a CUDA graph: static boundaries and tables that are filled before each replay.

A graph fixes the sizes of its launches and the addresses of its tensors. So the boundaries are padded with empty
documents until their number is a power of two, and each table to the largest number of rows that so many documents can
have. Rows of padding hold no tokens, and what kernels compute for them is never read.

A launch that depends on the longest document asks `Documents.reaches`, and the answer becomes a property of the graph.
The graph serves all documents that give the same answers. Its results are bitwise equal to those of calls with the
documents' own boundaries.

Processes that share a row read the boundaries of their parts of it, which are filled together with those of the row.
Each of them knows all boundaries. Once they have exchanged their `answers`, they agree on which documents fit.
"""

import weakref
from collections.abc import Callable, Hashable, Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .documents import Documents, Made, SomeTables, documents, moved, remember, rounded

Answer = tuple[int, int, int, bool]  # start and stop of a part, and whether it has a document of so many tokens


class StaticDocuments(Documents):
    """Documents whose boundaries and tables stay at the same addresses.

    Args:
        cu_seqlens: Memory for boundaries [N+1]; the constructor fills it.
        present: The first documents, at most N.

    Attributes:
        forbidden: Why a graph of the step would not serve other documents; None if nothing noted that.
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
        self._parts: dict[tuple[int, int], tuple[Tensor, StaticDocuments]] = {}  # boundaries and documents of parts
        self._required: set[Answer] = set()  # of other processes
        self._longest_bound: int | None = None
        self.forbidden: str | None = None
        self._hold(present)

    def fits(self, others: Documents) -> bool:
        """Return whether a graph that reads these tables gives the results of calls with the other documents."""
        if others.length != self._row or rounded(len(others.spans)) != self._room:
            return False
        answers = self.answers() | self._required
        return all((others.once(_longest, start, stop) >= tokens) == answer for start, stop, tokens, answer in answers)

    def answers(self) -> set[Answer]:
        """Return the answers on which the graph depends: those about the row, and those about its parts."""
        answers = {(0, self._row, tokens, answer) for tokens, answer in self._answers.items()}
        for (start, stop), (_, part) in self._parts.items():
            answers |= {(start, stop, tokens, answer) for tokens, answer in part._answers.items()}
        return answers

    def forbid_graphs(self, reason: str) -> None:
        self.forbidden = reason

    def require(self, answers: Iterable[Answer]) -> None:
        """Let documents fit only if they give these answers, too."""
        self._required.update(answers)

    def part(self, start: int, stop: int) -> Tensor:
        if (start, stop) not in self._parts:
            present = Documents(torch.tensor(self.within(start, stop)), self.device)
            cu_seqlens = torch.empty(self._room + 1, dtype=torch.int32, device=self.device)
            self._parts[start, stop] = cu_seqlens, StaticDocuments(cu_seqlens, present)
            remember(*self._parts[start, stop])
        return self._parts[start, stop][0]

    def fill(self, present: Documents) -> None:
        """Switch to documents that fit, without waiting for the device."""
        if present is self._present:
            return
        self._hold(present)
        for (make, *arguments), tables in self._tables.items():
            # in order of creation, so nested tables come first
            torch._foreach_copy_(list(tables.tensors()), list(make(self, *arguments).tensors()))
        for (start, stop), (_, part) in self._parts.items():
            part.fill(Documents(torch.tensor(present.within(start, stop)), self.device))

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


def _longest(packed: Documents, start: int, stop: int) -> int:
    """Return the number of tokens of the longest document in a part of a row."""
    return max(after - before for before, after in pairwise(packed.within(start, stop)))


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
