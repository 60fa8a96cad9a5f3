"""Multi-query associative recall: random key-value pairs, followed by queries for the values of the keys."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from zoo.data.batch import NO_LOSS, Batch
from zoo.data.loader import SampleSet
from zoo.data.order import distinct, shuffled, slots, whole

PASS = 100_000  # samples after which an endless stream counts as one epoch; nothing else depends on it
_ROUND = 1000  # batches over which the tasks of an endless stream are in proportion to their weights


@dataclass(frozen=True)
class RecallTask:
    """The size and weight of a recall task.

    Args:
        length: Tokens in a sequence.
        pairs: Key-value pairs at its start, each queried once; at most a quarter of `length`.
        weight: Relative frequency of training batches of this task.
    """

    length: int = 64
    pairs: int = 8
    weight: float = 1.0


class Recall:
    """Samples of one task; sample i is a function of seed, split and i alone.

    As in zoology (arXiv 2312.04927): K keys from 1 … V/2 − 1 and K values from V/2 … V − 1, all different, alternate in
    the first 2K tokens. Each key is then queried once, g = 0, 2, 4 … tokens after them, sampled without replacement
    with probability ∝ (g/2 + 1)^(power − 1). The label of a query is its value; other tokens have no label.
    """

    def __init__(self, task: RecallTask, size: int, vocab_size: int, fillers: bool, power: float, key: str) -> None:
        self.task, self.size, self.vocab_size, self.fillers, self.power = task, size, vocab_size, fillers, power
        self._seeds = [
            number_of(key, task.length, task.pairs, purpose) for purpose in ("keys", "values", "gaps", "rest")
        ]

    def __len__(self) -> int:
        return self.size

    def batch(self, indices: Sequence[int]) -> Batch:
        """The samples with these numbers, `[B, T]`."""
        numbers, (length, pairs) = np.array(indices, np.uint64), (self.task.length, self.task.pairs)
        keys, values, gaps, rest = self._seeds
        half, space = self.vocab_size // 2, length // 2 - pairs
        if self.fillers:
            tokens = whole(numbers, length, self.vocab_size, rest)
        else:
            tokens = np.zeros((len(numbers), length), np.int64)
        tokens[:, 0 : 2 * pairs : 2] = queries = 1 + distinct(numbers, pairs, half - 1, keys)
        tokens[:, 1 : 2 * pairs : 2] = answers = half + distinct(numbers, pairs, half, values)
        places = 2 * pairs + 2 * slots(numbers, pairs, space, self.power, gaps)
        labels = np.full_like(tokens, NO_LOSS)
        np.put_along_axis(tokens, places, queries, axis=1)
        np.put_along_axis(labels, places, answers, axis=1)
        return Batch(torch.from_numpy(tokens), torch.from_numpy(labels))


class RecallStream:
    """The training samples by position in the stream: batches of one task each, mixed by weight.

    A round of batches is in shuffled order, with the number of batches of each task in proportion to its weight. Each
    task counts its samples separately, so that all of the `samples` of a fixed set are used before any is repeated.
    """

    def __init__(
        self, tasks: Sequence[SampleSet], weights: Sequence[float], batch_size: int, samples: int | None, seed: int
    ) -> None:
        self.tasks, self.batch_size, self.samples, self.seed = tasks, batch_size, samples, seed
        if len(tasks) == 1:
            self.shares = [1]
        else:
            self.shares = shares(_ROUND if samples is None else samples // batch_size, weights)
        self._first = np.cumsum([0, *self.shares]).tolist()  # index of each task's first batch in a round

    def __len__(self) -> int:
        return self.samples or PASS

    def order(self, positions: np.ndarray, seed: int) -> np.ndarray:
        """The positions themselves; `batch` maps them to samples."""
        return positions

    def batch(self, indices: Sequence[int]) -> Batch:
        """The samples at these positions, which belong to one global batch."""
        number = indices[0] // self.batch_size
        place = int(shuffled(np.array([number]), self._first[-1], self.seed)[0])
        task = int(np.searchsorted(self._first, place, side="right")) - 1
        earlier = number // self._first[-1] * self.shares[task] + place - self._first[task]  # batches of this task
        positions = np.array(indices) + (earlier - number) * self.batch_size
        if self.samples is not None:
            positions = shuffled(positions, len(self.tasks[task]), self.seed)
        return self.tasks[task].batch(positions.tolist())


def shares(total: int, weights: Sequence[float]) -> list[int]:
    """Divide `total` into integers, each at least 1, as nearly in proportion to `weights` as possible."""
    exact = total * np.array(weights) / sum(weights)
    parts = np.maximum(exact.astype(int), 1)
    for part in np.argsort(parts - exact)[: max(total - parts.sum(), 0)]:
        parts[part] += 1
    return parts.tolist()


def number_of(*values: object) -> int:
    """A 64-bit hash of JSON-serialisable values, as the seed of an independent stream."""
    return int.from_bytes(hashlib.blake2b(json.dumps(values).encode(), digest_size=8).digest())
