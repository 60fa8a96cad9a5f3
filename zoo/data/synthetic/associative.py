"""Variants of multi-query associative recall: stacked, compositional, forgetting, and pairs that are one token.

Zoology (arXiv 2312.04927) has variants of the first three names. The definitions here are ours, inferred from these
names. The original is `Recall`. In all of them 0 fills the tokens that mean nothing, so that no filler looks like a
pair.
"""

import numpy as np

from kernels.errors import UserError
from zoo.data.batch import NO_LOSS
from zoo.data.synthetic.draws import distinct, slots, whole
from zoo.data.synthetic.token_tasks import Seeds, TokenTask


class Associative(TokenTask):
    """What the variants share: their sizes, and questions at random distances. Keys are 1 … V/2 − 1, values the rest.

    Args:
        length: Tokens in a sequence.
        pairs: Keys, each asked for once.
        power: Exponent of the distances, above 0; small values favour early questions, 1 is neutral.
        weight: Relative frequency of training batches of this task.
    """

    def __init__(self, length: int = 64, pairs: int = 4, power: float = 0.01, weight: float = 1.0) -> None:
        self.length, self.pairs, self.power, self.weight = length, pairs, power, weight
        if pairs < 1:
            raise UserError(f"pairs: {pairs} must be at least 1")
        if power <= 0:
            raise UserError(f"power: {power} must be above 0")

    @property
    def name(self) -> str:
        """`length_64_pairs_4`."""
        return f"length_{self.length}_pairs_{self.pairs}"

    def _needs(self, tokens: int) -> None:
        if self.length < tokens:
            raise UserError(f"length: {self.length} is too short, {self.pairs} pairs need at least {tokens} tokens")

    def _ask(
        self, tokens: np.ndarray, start: int, keys: np.ndarray, answers: np.ndarray, places: np.ndarray
    ) -> np.ndarray:
        """Write keys [B,K] into slots of two tokens from `start` on, and return labels: an answer [B,K] at each."""
        labels = np.full_like(tokens, NO_LOSS)
        np.put_along_axis(tokens, start + 2 * places, keys, axis=1)
        np.put_along_axis(labels, start + 2 * places, answers, axis=1)
        return labels


def _halves(vocab_size: int, keys: int, values: int) -> str | None:
    """Why a vocabulary does not hold so many keys and values; None if it does."""
    least = 2 * max(keys + 1, values)
    return f"needs an even number, at least {least}" if vocab_size % 2 or vocab_size < least else None


class StackedRecall(Associative):
    """Several recall tasks, one after the other in a sequence: what was remembered must make room (inferred).

    Each round is of length / rounds tokens: `pairs` pairs, all keys and values different, then a question for each
    key, g = 0, 2, 4 … tokens after them, as in `Recall`. The next round draws its pairs anew, so that a key may come
    again with another value. An answer is always a value of the same round.

    Args:
        length: Tokens in a sequence; a multiple of `rounds`, and in each round at least four times `pairs`.
        pairs: Pairs of a round.
        rounds: Number of rounds.
        power: Exponent of the distances, above 0; small values favour early questions, 1 is neutral.
        weight: Relative frequency of training batches of this task.

    Raises:
        UserError: The pairs do not fit the length, or an argument is out of range.
    """

    def __init__(
        self, length: int = 128, pairs: int = 4, rounds: int = 2, power: float = 0.01, weight: float = 1.0
    ) -> None:
        super().__init__(length, pairs, power, weight)
        self.rounds = rounds
        if rounds < 1 or length % rounds:
            raise UserError(f"rounds: {rounds} must be at least 1 and divide the length {length}")
        self._needs(4 * pairs * rounds)

    def misfit(self, vocab_size: int) -> str | None:
        """Each key and value occurs once in a round."""
        return _halves(vocab_size, self.pairs, self.pairs)

    def generate(self, numbers: np.ndarray, vocab_size: int, seeds: Seeds) -> tuple[np.ndarray, np.ndarray]:
        """Rounds are drawn as separate samples."""
        pairs, length, half = self.pairs, self.length // self.rounds, vocab_size // 2
        each = (numbers[:, None] * np.uint64(self.rounds) + np.arange(self.rounds, dtype=np.uint64)).ravel()
        tokens = np.zeros((len(each), length), np.int64)
        tokens[:, 0 : 2 * pairs : 2] = keys = 1 + distinct(each, pairs, half - 1, seeds("keys"))
        tokens[:, 1 : 2 * pairs : 2] = values = half + distinct(each, pairs, half, seeds("values"))
        places = slots(each, pairs, length // 2 - pairs, self.power, seeds("slots"))
        labels = self._ask(tokens, 2 * pairs, keys, values, places)
        return tokens.reshape(len(numbers), -1), labels.reshape(len(numbers), -1)


class CompositionalRecall(Associative):
    """The answer is the value of the value: links k → m and m → v, in random order, compose to k → v (inferred).

    A chain has `hops` links: the first starts at a key that is asked for, each further one where the one before ends,
    and the last ends in a value. All tokens of all chains differ. The links of all chains lie at the start in random
    order, 2 · hops · pairs tokens; then come the questions, as in `Recall`.

    Args:
        length: Tokens in a sequence; at least 2 · (hops + 1) · pairs.
        pairs: Chains.
        hops: Links of a chain; 1 is plain recall.
        power: Exponent of the distances, above 0; small values favour early questions, 1 is neutral.
        weight: Relative frequency of training batches of this task.

    Raises:
        UserError: The chains do not fit the length, or an argument is out of range.
    """

    def __init__(
        self, length: int = 64, pairs: int = 4, hops: int = 2, power: float = 0.01, weight: float = 1.0
    ) -> None:
        super().__init__(length, pairs, power, weight)
        self.hops = hops
        if hops < 1:
            raise UserError(f"hops: {hops} must be at least 1")
        self._needs(2 * (hops + 1) * pairs)

    def misfit(self, vocab_size: int) -> str | None:
        """The middles of chains are keys, too."""
        return _halves(vocab_size, self.hops * self.pairs, self.pairs)

    def generate(self, numbers: np.ndarray, vocab_size: int, seeds: Seeds) -> tuple[np.ndarray, np.ndarray]:
        """Column h of a chain is where its link h starts."""
        pairs, hops, half = self.pairs, self.hops, vocab_size // 2
        starts = 1 + distinct(numbers, pairs * hops, half - 1, seeds("keys")).reshape(-1, pairs, hops)
        values = half + distinct(numbers, pairs, half, seeds("values"))
        ends = np.concatenate([starts[:, :, 1:], values[:, :, None]], axis=2)
        total = pairs * hops
        order = distinct(numbers, total, total, seeds("order"))
        tokens = np.zeros((len(numbers), self.length), np.int64)
        tokens[:, 0 : 2 * total : 2] = np.take_along_axis(starts.reshape(-1, total), order, axis=1)
        tokens[:, 1 : 2 * total : 2] = np.take_along_axis(ends.reshape(-1, total), order, axis=1)
        places = slots(numbers, pairs, self.length // 2 - total, self.power, seeds("slots"))
        return tokens, self._ask(tokens, 2 * total, starts[:, :, 0], values, places)


class ForgettingRecall(Associative):
    """Keys are written several times, each time with another value; only the last one counts (inferred).

    Each of `pairs` keys is written `writes` times, in random order, always with a value that occurs nowhere else. The
    answer to the question for a key, as in `Recall`, is the value of its last writing.

    Args:
        length: Tokens in a sequence; at least 2 · (writes + 1) · pairs.
        pairs: Keys.
        writes: How often each key is written; 1 is plain recall.
        power: Exponent of the distances, above 0; small values favour early questions, 1 is neutral.
        weight: Relative frequency of training batches of this task.

    Raises:
        UserError: The writings do not fit the length, or an argument is out of range.
    """

    def __init__(
        self, length: int = 64, pairs: int = 4, writes: int = 2, power: float = 0.01, weight: float = 1.0
    ) -> None:
        super().__init__(length, pairs, power, weight)
        self.writes = writes
        if writes < 1:
            raise UserError(f"writes: {writes} must be at least 1")
        self._needs(2 * (writes + 1) * pairs)

    def misfit(self, vocab_size: int) -> str | None:
        """Each writing has a value of its own."""
        return _halves(vocab_size, self.pairs, self.writes * self.pairs)

    def generate(self, numbers: np.ndarray, vocab_size: int, seeds: Seeds) -> tuple[np.ndarray, np.ndarray]:
        """Writing w is of key w mod K, before the order is drawn."""
        pairs, half, total = self.pairs, vocab_size // 2, self.pairs * self.writes
        keys = 1 + distinct(numbers, pairs, half - 1, seeds("keys"))
        order = distinct(numbers, total, total, seeds("order"))  # which writing comes when
        values = half + distinct(numbers, total, half, seeds("values"))
        tokens = np.zeros((len(numbers), self.length), np.int64)
        tokens[:, 0 : 2 * total : 2] = np.take_along_axis(keys, order % pairs, axis=1)
        tokens[:, 1 : 2 * total : 2] = values
        # when each writing comes; the last of each key
        last = np.argsort(order, axis=1).reshape(-1, self.writes, pairs).max(axis=1)
        places = slots(numbers, pairs, self.length // 2 - total, self.power, seeds("slots"))
        answers = np.take_along_axis(values, last, axis=1)
        return tokens, self._ask(tokens, 2 * total, keys, answers, places)


class JointRecall(TokenTask):
    """Recall without the need to bring neighbours together: a key and its value are one token. For models of one layer.

    With n = `keys` and m = `values`, token 0 is not used, 1 … n ask for a key, n + 1 … n + m are values, and token
    n + m + 1 + i · m + j says that key i has value j. A sequence is `pairs` of these, of different keys and with any
    values, and then the questions for all keys in another order.

    Args:
        pairs: Pairs in a sequence of twice as many tokens; at most `keys`.
        keys: Number of keys.
        values: Number of values; guessing gives 1 / values.
        weight: Relative frequency of training batches of this task.

    Raises:
        UserError: An argument is out of range.
    """

    def __init__(self, pairs: int = 16, keys: int = 64, values: int = 16, weight: float = 1.0) -> None:
        self.pairs, self.keys, self.values, self.weight = pairs, keys, values, weight
        self.length = 2 * pairs
        if not 1 <= pairs <= keys:
            raise UserError(f"pairs: {pairs} must be from 1 to the number of keys, {keys}")
        if values < 2:
            raise UserError(f"values: {values} must be at least 2")

    @property
    def name(self) -> str:
        """`pairs_16`."""
        return f"pairs_{self.pairs}"

    def misfit(self, vocab_size: int) -> str | None:
        """Each pair is a token."""
        least = 1 + self.keys + self.values + self.keys * self.values
        return None if vocab_size >= least else f"needs at least {least}"

    def generate(self, numbers: np.ndarray, vocab_size: int, seeds: Seeds) -> tuple[np.ndarray, np.ndarray]:
        """Pairs, then questions."""
        keys = distinct(numbers, self.pairs, self.keys, seeds("keys"))
        values = whole(numbers, self.pairs, self.values, seeds("values"))
        order = distinct(numbers, self.pairs, self.pairs, seeds("order"))
        pairs = 1 + self.keys + self.values + keys * self.values + values
        tokens = np.concatenate([pairs, 1 + np.take_along_axis(keys, order, axis=1)], axis=1)
        answers = 1 + self.keys + np.take_along_axis(values, order, axis=1)
        return tokens, np.concatenate([np.full_like(answers, NO_LOSS), answers], axis=1)
