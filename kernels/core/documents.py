"""Packed documents: several sequences in one row, separated by `cu_seqlens`.

`cu_seqlens` [N+1] int holds the start of every document and, as its last entry, the length of the row. On a device its
values are read once per tensor object and version, so that ops do not synchronise on every call; everything derived
from them is cached with them. A change in place makes another version. Inference tensors count no versions, so they are
read on every call: `tracked` makes a copy that is not. Boundaries that were read on the host before they were copied to
a device are not read from it: `copied`.

A CUDA graph reads tables of `static_documents.py`, which are filled with other boundaries before each replay.

Boundaries are applied by the convolution in `features/composition.py` and `features/gpu/kernels.py`, by recurrences in
`core/chunking.py` and `gpu/layout.py`, and by attention in `window_attention/chunk.py`, `flex.py`, `flash.py` and
`gpu/decays.py`.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .tensors import check_tensors

Made = TypeVar("Made")
Parts = tuple[tuple[int, int], ...]  # start and stop in the row of the parts that several processes hold


class Tables(Protocol):
    """Something that is made of boundaries and read by kernels."""

    def tensors(self) -> Sequence[Tensor]:
        """All tensors that depend on the boundaries."""


SomeTables = TypeVar("SomeTables", bound=Tables)


class Common(NamedTuple):
    """Numbers that launches are chosen by, the largest of all parts if a row is shared by several processes.

    So a graph of the step of all processes depends on two numbers instead of two for each part.

    Attributes:
        documents: Number of documents.
        longest: Number of tokens of the longest one.
    """

    documents: int
    longest: int


class Documents:
    """The boundaries of N documents in a row of T tokens, on the host, and the index tensors derived from them.

    Args:
        cu_seqlens: The boundaries [N+1].
        device: Device of the index tensors; None for that of the boundaries.
        common: Numbers of all parts, if this row is one of them; None for those of this row.

    Attributes:
        bounded: Whether tables are padded to the largest number of rows that so many documents can need.
    """

    bounded = False

    def __init__(self, cu_seqlens: Tensor, device: torch.device | None = None, common: Common | None = None):
        self.device, self._common = cu_seqlens.device if device is None else device, common
        self._bounds: list[int] = cu_seqlens.tolist()
        self._made: dict[Hashable, Any] = {}

    @property
    def bounds(self) -> list[int]:
        """The boundaries [N+1]."""
        return self._bounds

    @property
    def length(self) -> int:
        """Number of tokens T of the row."""
        return self.bounds[-1]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Start and stop of each document; documents may be empty."""
        return list(zip(self.bounds, self.bounds[1:], strict=False))

    @property
    def longest(self) -> int:
        """Number of tokens of the longest document."""
        return max(stop - start for start, stop in self.spans)

    @property
    def common(self) -> Common:
        """Numbers that launches are chosen by."""
        if self._common is None:
            self._common = Common(len(self.spans), self.longest)
        return self._common

    @property
    def room(self) -> int:
        """Number of documents that launches are chosen by, rounded up."""
        return rounded(self.common.documents)

    def reaches(self, tokens: int) -> bool:
        """Return whether there is a document of at least so many tokens, in any part. Launches may depend on it."""
        return tokens <= self.length and tokens <= self.common.longest

    def longest_bound(self) -> int:
        """A number of tokens that no document exceeds."""
        return self.longest

    def forbid_graphs(self, reason: str) -> None:
        """Record that a step depends on the boundaries themselves, so a graph cannot serve other documents."""

    def within(self, start: int, stop: int) -> list[int]:
        """Return the boundaries of the tokens `start` to `stop` of the row, without those of empty documents."""
        bounds = self.bounds
        inner = dict.fromkeys(bounds[bisect_right(bounds, start) : bisect_left(bounds, stop)])
        return [0, *(bound - start for bound in inner), stop - start]

    def part(self, number: int, parts: Parts) -> Tensor:
        """Return int32 boundaries of a part of the row, without those of empty documents."""
        return self.once(_part, number, parts)

    def common_of(self, parts: Parts) -> Common:
        """Return the numbers that launches of these parts are chosen by."""
        return self.once(_common_of, parts)

    @property
    def owner(self) -> Tensor:
        """Index of the document that each token belongs to [T]."""
        return self.tables(_places).owner

    @property
    def positions(self) -> Tensor:
        """Position of each token in its document [T]."""
        return self.tables(_places).positions

    def chunks(self, size: int) -> "Chunks":
        """The documents cut into chunks of `size` tokens, each document padded separately (cached)."""
        return self.once(Chunks, size)

    def once(self, make: Callable[..., Made], *arguments: Any) -> Made:
        """make(self, *arguments), cached by function and arguments for the lifetime of the documents."""
        key = (make, *arguments)
        value = self._made.get(key)
        if value is None:
            value = self._made[key] = make(self, *arguments)
        return value

    def tables(self, make: Callable[..., SomeTables], *arguments: Any) -> SomeTables:
        """Like `once`, for tables whose shapes depend on `bounded` sizes alone if these documents are bounded."""
        return self.once(make, *arguments)

    def plan(self, make: Callable[..., Made], *arguments: Any) -> Made:
        """Like `once`, for what depends on boundaries only by tables, by `reaches` and by the rounded number N."""
        return self.once(make, *arguments)


def rounded(count: int) -> int:
    """A number of documents, rounded up to a power of two.

    Launches are chosen by it, so that a graph computes the same for any number of documents up to it.
    """
    return 1 << max(0, count - 1).bit_length()


def moved(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device, without waiting for the device."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


class _Places(NamedTuple):
    """Document and position of each token [T]."""

    owner: Tensor
    positions: Tensor

    def tensors(self) -> Sequence[Tensor]:
        return self


def _places(packed: Documents) -> _Places:
    bounds = torch.tensor(packed.bounds)
    owner = torch.repeat_interleave(torch.arange(len(bounds) - 1), bounds.diff())
    positions = torch.arange(packed.bounds[-1]) - bounds[owner]
    return _Places(moved(owner, packed.device), moved(positions, packed.device))


def _part(packed: Documents, number: int, parts: Parts) -> Tensor:
    with torch.inference_mode(False):  # the boundaries of such a tensor would be read again on every call
        original = torch.tensor(packed.within(*parts[number]), dtype=torch.int32)
        copy = moved(original, packed.device)
    remember(copy, Documents(original, packed.device, packed.common_of(parts)))
    return copy


def _common_of(packed: Documents, parts: Parts) -> Common:
    bounds = [packed.within(*part) for part in parts]
    longest = max(after - before for each in bounds for before, after in pairwise(each))
    return Common(max(len(each) - 1 for each in bounds), longest)


class Chunks:
    """Documents as padded chunks.

    Attributes:
        of: For each document, the indices of its chunks; none for an empty document.
        count: Number of chunks.
        token: Index of the token at each padded place [chunks·size]; 0 for padding.
        valid: Whether each padded place holds a token [chunks·size].
        place: Padded place of each token [T].
    """

    def __init__(self, documents: Documents, size: int):
        self.of: list[range] = []
        self.count, places = 0, []
        for start, stop in documents.spans:
            places.append(torch.arange(stop - start) + self.count * size)
            self.of.append(range(self.count, self.count - (start - stop) // size))
            self.count = self.of[-1].stop
        place = torch.cat(places)
        token = torch.full((self.count * size,), -1).index_copy(0, place, torch.arange(len(place)))
        device = documents.device
        self.token, self.valid, self.place = token.clamp(min=0).to(device), (token >= 0).to(device), place.to(device)


def places(cu_seqlens: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The document of each token [T] and the token's position in it [T]; compiled code stays on the device."""
    if not torch.compiler.is_compiling():
        packed = documents(cu_seqlens, length)
        return packed.owner, packed.positions
    time = torch.arange(length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    owner = torch.searchsorted(cu_seqlens, time, right=True) - 1
    return owner, (time - cu_seqlens[owner]).long()


_memo = WeakTensorKeyDictionary()  # cu_seqlens → its version and its documents


def tracked(cu_seqlens: Tensor) -> Tensor:
    """cu_seqlens, copied if it is an inference tensor on a device, which would be read again on every call."""
    if torch.compiler.is_compiling() or cu_seqlens.is_cpu or not cu_seqlens.is_inference():
        return cu_seqlens
    _, packed = _memo.get(cu_seqlens, (None, None))
    with torch.inference_mode(False):
        copy = cu_seqlens.clone()
    if packed is not None:  # from `copied`, just before
        remember(copy, packed)
    return copy


def copied(copy: Tensor, original: Tensor) -> Tensor:
    """Return `copy`, a copy on a device of boundaries on the host, which then are not read from the device.

    Raises:
        ValueError: They are not boundaries.
    """
    if copy is not original and original.is_cpu:
        remember(copy, _read(original, copy.device))
    return copy


def remember(cu_seqlens: Tensor, packed: Documents) -> None:
    """Make `documents` return these for this version of the boundaries; static ones, for all versions."""
    _memo[cu_seqlens] = version_of(cu_seqlens), packed


def _remembered(cu_seqlens: Tensor) -> Documents | None:
    """The documents of these boundaries from an earlier call, unless they have changed since."""
    version, cached = _memo.get(cu_seqlens, (None, None))
    if cached is None:
        # hooks of saved tensors return another object for the same memory, which the original keeps
        same = (entry for other, entry in _memo.items() if _same(cu_seqlens, other))
        version, cached = next(same, (None, None))
    if cached is not None and cached.bounded:
        return cached
    if cached is not None and (cu_seqlens.is_cpu or cu_seqlens.is_inference()):
        # reading costs nothing, or nothing else tells; on a CPU this also notices changes through NumPy or `.data`
        return cached if cached.bounds == cu_seqlens.tolist() else None
    return cached if version == version_of(cu_seqlens) else None


def _same(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors are the same memory, read in the same way."""
    return (x.data_ptr(), x.shape, x.dtype, x.stride()) == (y.data_ptr(), y.shape, y.dtype, y.stride())


def version_of(x: Tensor) -> int | None:
    """Number of in-place changes of a tensor; None if they are not counted."""
    return None if x.is_inference() else x._version


def _read(cu_seqlens: Tensor, device: torch.device | None = None) -> Documents:
    """The documents of boundaries, checked, with tables on a device, by default that of the boundaries."""
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64) or len(cu_seqlens) < 2:
        raise ValueError(
            f"cu_seqlens: expected an int32 or int64 vector of at least 2 boundaries, "
            f"got {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}"
        )
    packed = Documents(cu_seqlens) if device is None else Documents(cu_seqlens, device)
    if packed.bounds[0] != 0 or any(b < a for a, b in packed.spans):
        raise ValueError(f"cu_seqlens: boundaries must start at 0 and never decrease, got {packed.bounds}")
    return packed


def documents(cu_seqlens: Tensor, length: int, batch_size: int = 1, device: torch.device | None = None) -> Documents:
    """The checked documents of `cu_seqlens` for a row of `length` tokens, cached until the tensor changes.

    Raises:
        ValueError: `cu_seqlens` is not an integer vector, does not run from 0 to `length`, decreases or is not on
            `device`, or there is more than one row.
    """
    check_tensors(cu_seqlens=cu_seqlens)
    if device is not None and cu_seqlens.device != device:
        raise ValueError(f"cu_seqlens: is on {cu_seqlens.device}, but the tokens are on {device}")
    if batch_size != 1:
        raise ValueError(f"cu_seqlens: packed documents need a batch of 1 row, got {batch_size}")
    packed = _remembered(cu_seqlens)
    if packed is None:
        packed = _read(cu_seqlens)
        remember(cu_seqlens, packed)
    if packed.length != length:
        raise ValueError(f"cu_seqlens: ends at {packed.length}, but there are {length} tokens")
    return packed


# The attributes that torch.compiler.disable sets, without importing the compiler; the message names the cause.
documents._torchdynamo_disable = True  # type: ignore[attr-defined]
documents._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
    "the values of cu_seqlens are read on the host, so this call breaks the graph"
)
