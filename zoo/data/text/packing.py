"""Windows of tokens as samples, and batches of samples."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from kernels.errors import UserError
from zoo.data.batch import NO_LOSS, Batch
from zoo.data.order import shuffled
from zoo.data.text.shards import Shards

Packing = Literal["windows", "documents"]


class Sample(NamedTuple):
    """A window: tokens `[T]` int64, labels `[T]` int64, and the starts of its sequences (0 first) `[n]` int64."""

    tokens: np.ndarray
    labels: np.ndarray
    starts: np.ndarray


class Windows(Dataset):
    """The samples of a split: sample i has the tokens [i·T, (i + 1)·T); each label is the next token.

    With "windows", sequences continue across document boundaries. With "documents", a document's last token has no
    loss, and documents within a window are separate sequences. The last, incomplete window is not used.

    Raises:
        UserError: The split is shorter than one window and its last label, or an argument is out of range.
    """

    def __init__(self, shards: Shards, sequence_length: int, packing: Packing = "windows") -> None:
        if sequence_length < 1:
            raise UserError(f"data.sequence_length is {sequence_length}; it must be at least 1.")
        if packing not in ("windows", "documents"):
            raise UserError(f"data.packing is {packing!r}; it must be 'windows' or 'documents'.")
        self.shards, self.sequence_length, self.packing = shards, sequence_length, packing
        if len(shards) <= sequence_length:
            split_off = shards.split == "validation" and shards.manifest["validation_fraction"] is not None
            hint = " or raise data.validation_fraction" if split_off else ""
            raise UserError(
                f"data.sequence_length is {sequence_length}, but the {shards.split} split has {len(shards)} tokens; "
                f"one more than the sequence length is needed: lower it, add text{hint}."
            )

    def __len__(self) -> int:
        return (len(self.shards) - 1) // self.sequence_length

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        first, end = index * self.sequence_length, (index + 1) * self.sequence_length
        tokens = self.shards.read(first, end + 1)
        labels, starts = tokens[1:], np.zeros(1, np.int64)
        if self.packing == "documents":
            labels = labels.copy()
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
        """Collate B samples: `[B, T]`, or with "documents" one row `[1, B·T]` and `cu_seqlens`."""
        tokens = torch.from_numpy(np.stack([sample.tokens for sample in samples]))
        labels = torch.from_numpy(np.stack([sample.labels for sample in samples]))
        if self.packing == "windows":
            return Batch(tokens, labels)
        offsets = [sample.starts + row * self.sequence_length for row, sample in enumerate(samples)]
        cu_seqlens = np.concatenate([*offsets, [tokens.numel()]]).astype(np.int32)
        return Batch(tokens.view(1, -1), labels.view(1, -1), torch.from_numpy(cu_seqlens))
