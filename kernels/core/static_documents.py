"""Packed documents of a CUDA graph: static boundaries and tables that are filled before each replay.

A graph fixes the sizes of its launches and the addresses of its tensors. So the boundaries are padded with empty
documents until their number is a power of two, and each table to the largest number of rows that so many documents can
have. Rows of padding hold no tokens, and what kernels compute for them is never read.

A launch that depends on the longest document asks `Documents.reaches`, and the answer becomes a property of the graph.
The graph serves all documents that give the same answers. Its results are bitwise equal to those of calls with the
documents' own boundaries.

Processes that share a row read the boundaries of their parts of it, which are filled together with those of the row.
Each of them knows all boundaries. Their launches and the room of each part depend on numbers of all parts (`Common`),
so that there are few shapes. Once they have exchanged their `answers`, they agree on which documents fit.
"""

import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

from .documents import Common, Documents, Made, Parts, SomeTables, documents, moved, remember, rounded
from .torch_internals import copy_each

Answer = tuple[Parts, int, bool]  # parts, and whether one of them has a document of so many tokens


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
        self._parts: dict[tuple[int, Parts], tuple[Tensor, StaticDocuments]] = {}  # boundaries and documents of parts
        self._required: set[Answer] = set()  # of other processes
        self._longest_bound: int | None = None
        self.forbidden: str | None = None
        self._hold(present)

    def fits(self, others: Documents) -> bool:
        """Return whether a graph that reads these tables gives the results of calls with the other documents."""
        if others.length != self._row or len(others.spans) > self._room:
            return False
        # the row of parts is read by none of them
        rooms = {parts: part.room for (_, parts), (_, part) in self._parts.items()}
        if any(rounded(others.common_of(parts).documents) != room for parts, room in rooms.items()):
            return False
        if not rooms and others.room != self.room:
            return False
        answers = self.answers() | self._required
        return all((others.common_of(parts).longest >= tokens) == answer for parts, tokens, answer in answers)

    def answers(self) -> set[Answer]:
        """Return the answers on which the graph depends: those about the row, and those about its parts."""
        answers: set[Answer] = {(((0, self._row),), tokens, answer) for tokens, answer in self._answers.items()}
        for (_, parts), (_, part) in self._parts.items():
            answers |= {(parts, tokens, answer) for tokens, answer in part._answers.items()}
        return answers

    def forbid_graphs(self, reason: str) -> None:
        self.forbidden = reason

    def require(self, answers: Iterable[Answer]) -> None:
        """Let documents fit only if they give these answers, too."""
        self._required.update(answers)

    def part(self, number: int, parts: Parts) -> Tensor:
        if (number, parts) not in self._parts:
            present = _part(self._present, number, parts)
            cu_seqlens = torch.empty(present.room + 1, dtype=torch.int32, device=self.device)
            self._parts[number, parts] = cu_seqlens, StaticDocuments(cu_seqlens, present)
            remember(*self._parts[number, parts])
        return self._parts[number, parts][0]

    def fill(self, present: Documents) -> None:
        """Switch to documents that fit, without waiting for the device."""
        if present is self._present:
            return
        self._hold(present)
        for (make, *arguments), tables in self._tables.items():
            # in order of creation, so nested tables come first
            copy_each(list(tables.tensors()), list(make(self, *arguments).tensors()))
        for (number, parts), (_, part) in self._parts.items():
            part.fill(_part(present, number, parts))

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

    @property
    def common(self) -> Common:
        return self._present.common

    def reaches(self, tokens: int) -> bool:
        # parts may be shorter than another one, and than its documents
        return tokens <= self._row and self._answers.setdefault(tokens, self._present.reaches(tokens))

    def longest_bound(self) -> int:
        if self._longest_bound is None:
            self._longest_bound = min(self._row, rounded(self._present.common.longest))
            self.reaches(self._longest_bound + 1)
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


def _part(packed: Documents, number: int, parts: Parts) -> Documents:
    """Return the documents of a part, with static tables on the device of the row."""
    return Documents(torch.tensor(packed.within(*parts[number])), packed.device, packed.common_of(parts))


def static_copy(cu_seqlens: Tensor, length: int, parts: int = 1) -> Tensor:
    """Return padded boundaries that a graph can read; `StaticDocuments.fill` replaces their contents.

    Args:
        cu_seqlens: The first boundaries [N+1].
        length: Number of tokens of the row.
        parts: Number of processes that share the row. Each part has room for at most N documents, rounded up, and the
            row has room for those of all parts.
    """
    present = documents(cu_seqlens, length)
    static = cu_seqlens.new_empty(parts * present.room + 1)
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
