"""Data loaders: an endless, resumable one for training, and one that yields each validation sample once."""

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from zoo.data.batch import NO_LOSS, Batch
from zoo.data.workers import context, only_killed_by, signals_blocked


class SampleSet(Protocol):
    """Numbered samples of equal length, as loaded for validation."""

    def __len__(self) -> int:
        """Number of samples."""

    def batch(self, indices: Sequence[int]) -> Batch:
        """A batch of the samples with these numbers, in this order."""


class OrderedSamples(SampleSet, Protocol):
    """SampleSet with a training order."""

    def order(self, positions: np.ndarray, seed: int) -> np.ndarray:
        """`[n]` positions in the endless stream, within one global batch → `[n]` int64 sample numbers."""


@dataclass(eq=False, repr=False)
class TrainLoader:
    """Batches of the shuffled, endless stream; each rank gets its share of a global batch of `batch_size` sequences.

    `position`, the number of samples that all ranks together have received, is the whole state: after setting it, the
    next batch is the one at that position, for any number of ranks and workers.

    `for batch in loader` yields `len(loader)` batches, about one pass over the data in whole optimiser steps, each of
    which accumulates the gradients of `batches_per_step` batches, and the next `for` continues from there.
    """

    samples: OrderedSamples
    batch_size: int
    rank: int = 0
    world_size: int = 1
    seed: int = 0
    num_workers: int = 0
    batches_per_step: int = 1

    def __post_init__(self) -> None:
        self._position = 0
        self._iterator: Iterator[Batch] | None = None  # Lightning uses this name to stop workers

    @property
    def position(self) -> int:
        return self._position

    @position.setter
    def position(self, position: int) -> None:
        self._position = position
        self._iterator = None  # discards prefetched batches

    def __len__(self) -> int:
        """Batches in about one pass over the data; whole steps, since Lightning ends a step at the end of an epoch."""
        steps = len(self.samples) // (self.batch_size * self.batches_per_step)
        return max(1, steps) * self.batches_per_step

    def __iter__(self) -> Iterator[Batch]:
        # A generator, which reads the position at the first batch: Lightning may create the iterator before it restores
        # a checkpoint (for instance if `estimated_stepping_batches` is read early).
        for _ in range(len(self)):
            if self._iterator is None:
                with signals_blocked():
                    self._iterator = iter(self._batches_from(self._position))
            batch = next(self._iterator)
            self._position += self.batch_size
            yield batch

    def _batches_from(self, position: int) -> DataLoader:
        share = self.batch_size // self.world_size
        firsts = itertools.count(position + self.rank * share, self.batch_size)
        return _data_loader(_Batches(self.samples), _shares(self.samples, firsts, share, self.seed), self.num_workers)

    # Lightning warns on resume about loaders without these two. The data module saves the position instead, since
    # Lightning drops loader states in some cases, but never that of a data module.
    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        pass


def _shares(samples: OrderedSamples, firsts: Iterable[int], share: int, seed: int) -> Iterator[list[int]]:
    """Yield the sample numbers of one rank, batch by batch. A loader in here would keep its workers alive."""
    for first in firsts:
        yield samples.order(np.arange(first, first + share), seed).tolist()


@dataclass(eq=False, repr=False)
class ValidationLoader:
    """Yields every sample once, in order, in batches of `batch_size` over all ranks.

    All ranks get equally many batches of equal shape, as collective operations require: a last batch that does not
    divide evenly is filled with samples whose labels are all −100. So weight a mean loss by labels, not by batches.
    """

    samples: SampleSet
    batch_size: int
    rank: int = 0
    world_size: int = 1
    num_workers: int = 0

    def __post_init__(self) -> None:
        self._iterator: Iterator[Batch] | None = None

    def __len__(self) -> int:
        return -(-len(self.samples) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        # Kept on the object so that Lightning can stop its workers.
        with signals_blocked():
            self._iterator = iter(_data_loader(_Filled(self.samples), self._indices(), self.num_workers))
        return self._iterator

    def stop(self) -> None:
        """Stop the workers of an iteration that was not finished."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None and self.num_workers:
            iterator._shutdown_workers()  # type: ignore[attr-defined]

    def _indices(self) -> list[list[int]]:
        batches = []
        for first in range(0, len(self.samples), self.batch_size):
            real = min(self.batch_size, len(self.samples) - first)
            filled = -(-real // self.world_size) * self.world_size
            batches.append(list(range(first + self.rank, first + filled, self.world_size)))
        return batches


class _Batches(Dataset):
    """A dataset whose indices are lists of sample numbers, and whose items are batches."""

    def __init__(self, samples: SampleSet) -> None:
        self._samples = samples

    def __getitem__(self, indices: list[int]) -> Batch:
        return self._samples.batch(indices)


class _Filled(_Batches):
    """As `_Batches`, but numbers past the end give the last sample without labels."""

    def __getitem__(self, indices: list[int]) -> Batch:
        last = len(self._samples) - 1
        batch = self._samples.batch([min(index, last) for index in indices])
        batch.labels.view(len(indices), -1)[torch.tensor(indices) > last] = NO_LOSS
        return batch


def _data_loader(batches: _Batches, indices: Iterable[list[int]], num_workers: int) -> DataLoader:
    return DataLoader(
        batches,
        batch_size=None,  # an item is a whole batch
        sampler=indices,
        num_workers=num_workers,
        pin_memory=torch.cuda.is_available(),
        worker_init_fn=partial(_start_worker, os.getpid()),
        multiprocessing_context=context() if num_workers else None,
        generator=torch.Generator(),  # otherwise each iterator would draw from the global random state
    )


def _start_worker(parent: int, worker: int) -> None:
    only_killed_by(parent)
