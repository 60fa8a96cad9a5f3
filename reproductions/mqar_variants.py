"""Variants of multi-query associative recall as in zoology (arXiv 2312.04927): stacked, compositional and forgetting.

    python cli.py fit --config recall/mqar.yaml --config reproductions/mqar_variants/forgetting.yaml --run=forgetting
    python cli.py evaluate --checkpoint=runs/forgetting --tasks=reproductions.mqar_variants.ForgettingTask

The original is `zoo.data.MQAR`. Where a definition differs from zoology's code, its docstring says so.
"""

import math
from dataclasses import dataclass

import numpy as np

from kernels.errors import UserError
from mixers.arguments import check_numbers, check_sizes
from zoo.data.batch import NO_LOSS
from zoo.data.order import distinct, slots, whole
from zoo.data.synthetic.task import Seeds, TokenTask
from zoo.evaluation.task import Cell, Task
from zoo.evaluation.tasks.token_tasks import PairsEvaluation


@dataclass(eq=False, repr=False)
class StackedRecall(TokenTask):
    """Recall in which one token names both a key and its value, so that one layer can solve it.

    Of V tokens, let n be √V − 1, rounded down. Token 0 is not used, 1 … n ask for a key, n + 1 … 2n are values, and
    token 2n + 1 + i · n + j says that key i has value j. A sequence names `pairs` different keys with any values,
    `passes` times in another order each time, and then asks for all keys in another order.

    (Zoology's sequences are vectors, the embeddings of key and value side by side, and its values differ.)

    Args:
        pairs: Pairs in a sequence of (passes + 1) · pairs tokens.
        passes: How often each pair is named.
        weight: Relative frequency of training batches of this task.

    Raises:
        UserError: An argument is out of range.
    """

    pairs: int = 16
    passes: int = 1
    weight: float = 1.0

    def __post_init__(self) -> None:
        check_sizes({"pairs": self.pairs, "passes": self.passes})
        self.length = (self.passes + 1) * self.pairs

    @property
    def name(self) -> str:
        """`pairs_16`, or `pairs_16_passes_2`."""
        return f"pairs_{self.pairs}" + (f"_passes_{self.passes}" if self.passes > 1 else "")

    def misfit(self, vocab_size: int) -> str | None:
        """Each pair of a key and a value is a token."""
        least = (max(self.pairs, 2) + 1) ** 2
        return None if vocab_size >= least else f"needs at least {least}"

    def generate(self, numbers: np.ndarray, vocab_size: int, seeds: Seeds) -> tuple[np.ndarray, np.ndarray]:
        """Pairs, then questions."""
        size = keys_of(vocab_size)
        keys = distinct(numbers, self.pairs, size, seeds("keys"))
        values = whole(numbers, self.pairs, size, seeds("values"))
        pairs = 1 + 2 * size + keys * size + values
        orders = [distinct(numbers, self.pairs, self.pairs, seeds(f"order {turn}")) for turn in range(self.passes)]
        named = [pairs, *(np.take_along_axis(pairs, order, axis=1) for order in orders[1:])]
        tokens = np.concatenate([*named, 1 + np.take_along_axis(keys, orders[0], axis=1)], axis=1)
        answers = 1 + size + np.take_along_axis(values, orders[0], axis=1)
        unlabelled = np.full((len(numbers), self.passes * self.pairs), NO_LOSS)
        return tokens, np.concatenate([unlabelled, answers], axis=1)


def keys_of(vocab_size: int) -> int:
    """Return the number of keys, and of values, in a vocabulary of `StackedRecall`."""
    return math.isqrt(vocab_size) - 1


class Associative(TokenTask):
    """Base of the other variants: questions at random distances, among fillers."""

    pairs: int
    random_fillers: bool
    power: float
    named_after = ("length", "pairs")

    def __post_init__(self) -> None:
        check_sizes({"pairs": self.pairs})
        check_numbers({"power": self.power})

    def _needs(self, tokens: int) -> None:
        if self.length < tokens:
            raise UserError(f"length: {self.length} is too short, {self.pairs} pairs need at least {tokens} tokens")

    def _fillers(self, numbers: np.ndarray, vocab_size: int, seeds: Seeds) -> np.ndarray:
        if self.random_fillers:
            return whole(numbers, self.length, vocab_size, seeds("fillers"))
        return np.zeros((len(numbers), self.length), np.int64)


@dataclass(eq=False, repr=False)
class CompositionalRecall(Associative):
    """A value belongs to a pair of keys, and neither of the two says which.

    √pairs first keys from 1 … V/3 − 1 and √pairs second keys from V/3 … 2V/3 − 1 make `pairs` combinations; each has a
    different value from 2V/3 … V − 1. Triplets (first key, second key, value) are at the start in random order. Each
    combination is queried once, g = 0, 3, 6 … tokens after them, with probabilities as in `Recall`; the label is at
    the second key.

    Args:
        length: Tokens in a sequence; at least 6 · pairs.
        pairs: Combinations, a square number.
        random_fillers: Whether the tokens between the questions are random; otherwise they are 0.
        power: Exponent of the distances, above 0; small values favour early questions, 1 is neutral.
        weight: Relative frequency of training batches of this task.

    Raises:
        UserError: The combinations do not fit the length, or an argument is out of range.
    """

    length: int = 64
    pairs: int = 4
    random_fillers: bool = True
    power: float = 0.01
    weight: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if math.isqrt(self.pairs) ** 2 != self.pairs:
            raise UserError(f"pairs: {self.pairs} must be a square number, such as 4, 9 or 16")
        self._needs(6 * self.pairs)

    def misfit(self, vocab_size: int) -> str | None:
        """A third each for first keys, second keys and values."""
        least = 3 * max(math.isqrt(self.pairs) + 1, self.pairs)
        return None if vocab_size >= least else f"needs at least {least}"

    def generate(self, numbers: np.ndarray, vocab_size: int, seeds: Seeds) -> tuple[np.ndarray, np.ndarray]:
        """Combination c is of first key c // √pairs and second key c mod √pairs, before the order is drawn."""
        third, pairs, side = vocab_size // 3, self.pairs, math.isqrt(self.pairs)
        combination = distinct(numbers, pairs, pairs, seeds("order"))
        first = 1 + distinct(numbers, side, third - 1, seeds("first keys"))
        second = third + distinct(numbers, side, third, seeds("second keys"))
        first = np.take_along_axis(first, combination // side, axis=1)
        second = np.take_along_axis(second, combination % side, axis=1)
        values = 2 * third + distinct(numbers, pairs, vocab_size - 2 * third, seeds("values"))
        tokens = self._fillers(numbers, vocab_size, seeds)
        tokens[:, 0 : 3 * pairs : 3], tokens[:, 1 : 3 * pairs : 3], tokens[:, 2 : 3 * pairs : 3] = first, second, values
        places = 3 * pairs + 3 * slots(numbers, pairs, self.length // 3 - pairs, self.power, seeds("slots"))
        labels = np.full_like(tokens, NO_LOSS)
        np.put_along_axis(tokens, places, first, axis=1)
        np.put_along_axis(tokens, places + 1, second, axis=1)
        np.put_along_axis(labels, places + 1, values, axis=1)
        return tokens, labels


@dataclass(eq=False, repr=False)
class ForgettingRecall(Associative):
    """Some keys are written twice, and the second value counts.

    Keys are 1 … V/2 − 1, values V/2 … V − 1. As in `Recall`, `pairs` keys and values, all different, stand at the
    start; then come `updates` of these keys, each with another value than before. Each key is queried once, as in
    `Recall`, and the answer is its last value.

    Args:
        length: Tokens in a sequence; at least 2 · (2 · pairs + updates).
        pairs: Keys.
        updates: How many of them are written again; 0 is plain recall.
        random_fillers: Whether the tokens between the questions are random; otherwise they are 0.
        power: Exponent of the distances, above 0; small values favour early questions, 1 is neutral.
        weight: Relative frequency of training batches of this task.

    Raises:
        UserError: The writings do not fit the length, or an argument is out of range.
    """

    length: int = 64
    pairs: int = 8
    updates: int = 4
    random_fillers: bool = True
    power: float = 0.01
    weight: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.updates <= self.pairs:
            raise UserError(f"updates: {self.updates} must be from 0 to the number of pairs, {self.pairs}")
        self._needs(2 * (2 * self.pairs + self.updates))

    def misfit(self, vocab_size: int) -> str | None:
        """Half of the tokens are keys, half of them values."""
        least = 2 * max(self.pairs + 1, 2)
        return f"needs an even number, at least {least}" if vocab_size % 2 or vocab_size < least else None

    def generate(self, numbers: np.ndarray, vocab_size: int, seeds: Seeds) -> tuple[np.ndarray, np.ndarray]:
        """The keys that are written again are in random order."""
        pairs, half, writings = self.pairs, vocab_size // 2, self.pairs + self.updates
        keys = 1 + distinct(numbers, pairs, half - 1, seeds("keys"))
        values = distinct(numbers, pairs, half, seeds("values"))
        updated = distinct(numbers, self.updates, pairs, seeds("updates"))
        steps = 1 + whole(numbers, self.updates, half - 1, seeds("new values"))  # never back to the same value
        renewed = (np.take_along_axis(values, updated, axis=1) + steps) % half
        tokens = self._fillers(numbers, vocab_size, seeds)
        tokens[:, 0 : 2 * writings : 2] = np.concatenate([keys, np.take_along_axis(keys, updated, axis=1)], axis=1)
        tokens[:, 1 : 2 * writings : 2] = half + np.concatenate([values, renewed], axis=1)
        np.put_along_axis(values, updated, renewed, axis=1)
        places = 2 * (writings + slots(numbers, pairs, self.length // 2 - writings, self.power, seeds("slots")))
        labels = np.full_like(tokens, NO_LOSS)
        np.put_along_axis(tokens, places, keys, axis=1)
        np.put_along_axis(labels, places, half + values, axis=1)
        return tokens, labels


class StackedTask(PairsEvaluation):
    """Pairs that are one token (`StackedRecall`), each named once, without fillers."""

    name = "mqar_stacked"
    measures = "recall where a key and its value are one token, over the number of pairs"
    per_pair, shortest = 2, 8

    def task(self, cell: Cell) -> TokenTask:
        """The data's task of a cell."""
        return StackedRecall(cell["pairs"])

    def sizes(self, length: int) -> list[Cell]:
        """The number of pairs says how long a sequence is."""
        return [{"length": 2 * cell["pairs"], "pairs": cell["pairs"]} for cell in super().sizes(length)]


class CompositionalTask(PairsEvaluation):
    """Values of pairs of keys (`CompositionalRecall`), all combinations of as many first as second keys."""

    name = "mqar_compositional"
    measures = "recall of values by two keys together, over the number of their combinations"
    data, per_pair, shortest, square = CompositionalRecall, 6, 24, True


class ForgettingTask(PairsEvaluation):
    """Keys of which half are written twice (`ForgettingRecall`)."""

    name = "mqar_forgetting"
    measures = "recall of the value that was written last, over the number of keys"
    per_pair, shortest = 5, 20

    def task(self, cell: Cell) -> TokenTask:
        """The data's task of a cell."""
        return ForgettingRecall(cell["length"], cell["pairs"], updates=cell["pairs"] // 2)


TASKS: tuple[type[Task], ...] = (StackedTask, CompositionalTask, ForgettingTask)
