"""Windows of tokens as samples, and batches of samples."""

import itertools
import logging
from collections.abc import Sequence
from typing import Literal, NamedTuple, NoReturn, get_args

import numpy as np
import torch
from torch.utils.data import Dataset

from kernels.errors import UserError
from zoo.data.batch import NO_LOSS, Batch
from zoo.data.order import shuffled
from zoo.data.text.shards import Shards

log = logging.getLogger(__name__)

Packing = Literal["windows", "documents", "whole_documents"]


class Sample(NamedTuple):
    """A window: tokens `[T]` int64, labels `[T]` int64, and the starts of its sequences (0 first) `[n]` int64."""

    tokens: np.ndarray
    labels: np.ndarray
    starts: np.ndarray


class Windows(Dataset):
    """The samples of a split: sample i has the tokens [i·T, (i + 1)·T); each label is the next token.

    With "windows", sequences continue across document boundaries. With "documents", a document's last token has no
    loss, and documents within a window are separate sequences. The last, incomplete window is not used.

    Args:
        shards: The tokens of the split.
        sequence_length: T.
        packing: "windows" or "documents".

    Raises:
        UserError: The split is shorter than one window and its last label, or an argument is out of range.
    """

    def __init__(self, shards: Shards, sequence_length: int, packing: Packing = "windows") -> None:
        check_packing(sequence_length, packing)
        self.shards, self.sequence_length, self.packing = shards, sequence_length, packing
        self._check_size()

    def _check_size(self) -> None:
        if len(self.shards) <= self.sequence_length:
            size = f"has {len(self.shards)} tokens"
            self._refuse(f"{size}; one more than the sequence length is needed: lower it, add text")

    def _refuse(self, reason: str) -> NoReturn:
        shards = self.shards
        split_off = shards.manifest.get(f"{shards.split}_fraction") is not None
        hint = f" or raise data.{shards.split}_fraction" if split_off else ""
        raise UserError(f"data.sequence_length is {self.sequence_length}, but the {shards.split} split {reason}{hint}.")

    def __len__(self) -> int:
        return (len(self.shards) - 1) // self.sequence_length

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        first, end = index * self.sequence_length, (index + 1) * self.sequence_length
        tokens = self.shards.read(first, end + 1)
        labels, starts = tokens[1:], np.zeros(1, np.int64)
        if self.packing == "documents":
            labels = labels.copy()  # which are a part of `tokens`
            next_starts = self.shards.starts_in(first + 1, end + 1) - first
            labels[next_starts - 1] = NO_LOSS  # the next token belongs to another document
            starts = np.concatenate([starts, next_starts[next_starts < self.sequence_length]])
        return Sample(tokens[:-1], labels, starts)

    def order(self, positions: np.ndarray, seed: int) -> np.ndarray:
        """The sample at each position of the shuffled, endless stream: `[n]` → `[n]` int64."""
        return shuffled(positions, len(self), seed)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The samples with these numbers, collated."""
        return self.collate([self[index] for index in indices])

    def collate(self, samples: list[Sample]) -> Batch:
        """Collate B samples: `[B, T]`, or unless the packing is "windows" one row `[1, B·T]` and `cu_seqlens`."""
        tokens = torch.from_numpy(np.stack([sample.tokens for sample in samples]))
        labels = torch.from_numpy(np.stack([sample.labels for sample in samples]))
        if self.packing == "windows":
            return Batch(tokens, labels)
        offsets = [sample.starts + row * self.sequence_length for row, sample in enumerate(samples)]
        cu_seqlens = np.concatenate([*offsets, [tokens.numel()]]).astype(np.int32)
        return Batch(tokens.view(1, -1), labels.view(1, -1), torch.from_numpy(cu_seqlens))


class WholeDocuments(Windows):
    """Samples of documents that are never cut: as many in a row as fit into T tokens, then padding without loss.

    Documents of more than T tokens are left out, which is logged.
    """

    def _check_size(self) -> None:
        starts = self.shards.document_starts
        bounds = np.append(starts, len(self.shards)).tolist()
        self._rows: list[tuple[int, int]] = []  # first token, and end
        longer = 0
        for first, end in itertools.pairwise(bounds):
            if end - first > self.sequence_length:
                longer += 1
            elif self._rows and self._rows[-1][1] == first and end - self._rows[-1][0] <= self.sequence_length:
                self._rows[-1] = self._rows[-1][0], end
            else:
                self._rows.append((first, end))
        if not self._rows:
            self._refuse("has no document that is as short: raise it, add text")
        if longer:
            log.warning(
                "data.sequence_length is %d: %d of %d documents of the %s split are longer and are left out.",
                *(self.sequence_length, longer, len(starts), self.shards.split),
            )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        first, end = self._rows[index]
        tokens, labels = np.zeros(self.sequence_length, np.int64), np.full(self.sequence_length, NO_LOSS, np.int64)
        size = end - first
        tokens[:size] = self.shards.read(first, end)
        labels[: size - 1] = tokens[1:size]
        starts = self.shards.starts_in(first, end) - first
        labels[starts[1:] - 1] = NO_LOSS  # the next token belongs to another document
        padding = [size] if size < self.sequence_length else []
        return Sample(tokens, labels, np.append(starts, padding).astype(np.int64))


def samples_of(shards: Shards, sequence_length: int, packing: Packing) -> Windows:
    """The samples of a split.

    Raises:
        UserError: As `Windows`.
    """
    kind = WholeDocuments if packing == "whole_documents" else Windows
    return kind(shards, sequence_length, packing)


def check_packing(sequence_length: int, packing: str) -> None:
    """Raise a UserError for an argument of `Windows` that is out of range."""
    if sequence_length < 1:
        raise UserError(f"data.sequence_length is {sequence_length}; it must be at least 1.")
    if packing not in get_args(Packing):
        raise UserError(f"data.packing is {packing!r}; it must be one of {', '.join(get_args(Packing))}.")
