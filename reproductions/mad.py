"""The synthetic tasks of MAD (arXiv 2403.17844): recall in context, selective copying, compression, memorisation.

    python cli.py fit --config recall/mqar.yaml --config reproductions/mad_tasks/copy.yaml --run=copy
    python cli.py evaluate --checkpoint=runs/copy --tasks=reproductions.mad.MadCopy

Sizes are those of the authors' code (16 tokens, sequences of 128, 256 for copying, 32 for compression, 256 tokens for
memorisation; motifs of up to 3 tokens; 20 % of noise in 16 tokens). What a docstring calls inferred is our reading.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np

from kernels.errors import UserError
from mixers.arguments import check_sizes
from zoo.data.batch import NO_LOSS
from zoo.data.order import distinct, real, whole
from zoo.data.synthetic.task import Seeds, TokenTask
from zoo.evaluation.task import Cell, Task
from zoo.evaluation.tasks.token_tasks import TokenEvaluation

_ABSENT = -1  # in place of tokens that a shorter unit lacks


@dataclass(eq=False, repr=False)
class InContextRecall(TokenTask):
    """Keys and values in turn, keys drawn again and again; a key that came before is answered by the same value.

    Token 0 is not used, keys are made of 1 … V/2 − 1 and values of V/2 … V − 1, where V leaves out the tokens of noise.
    A sequence draws `pairs` different keys and for each a value, and then lines them up at random. Where a key comes
    for the second time or later, its value is labelled: at the last token of the key, and at those of the value but the
    last. Two settings make it MAD's other tasks:

    - Fuzzy recall, `motif: 3`: keys and values are motifs of 1, 2 or 3 tokens, all lengths equally likely. (That a
      sequence draws from few keys is inferred; else three tokens of seven would hardly ever come again.)
    - Noisy recall, `noise: 0.2`: on average so many of the tokens are noise, which is between a value and the next
      key (the place is inferred) and is drawn from the `noise_tokens` uppermost tokens.

    Args:
        length: Tokens in a sequence.
        pairs: Different keys of a sequence; null for one per token of the keys' vocabulary.
        motif: The most tokens of a key or value.
        noise: Share of tokens that are noise, below 1.
        noise_tokens: Size of the vocabulary of noise, on top of that of keys and values.
        weight: Relative frequency of training batches of this task.

    Raises:
        UserError: An argument is out of range.
    """

    length: int = 128
    pairs: int | None = None
    motif: int = 1
    noise: float = 0.0
    noise_tokens: int = 16
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.pairs is not None and self.pairs < 1:
            raise UserError(f"pairs: {self.pairs} must be at least 1, or null")
        check_sizes({"motif": self.motif, "noise_tokens": self.noise_tokens})
        if not 0 <= self.noise < 1:
            raise UserError(f"noise: {self.noise} must be from 0 to below 1")
        if self.length < (least := 4 * self.motif):
            raise UserError(f"length: {self.length} is too short, a key that comes twice needs {least} tokens")

    @property
    def name(self) -> str:
        """`length_128`, `length_128_motif_3`, `length_128_noise_20`."""
        parts = [f"length_{self.length}"]
        parts += [f"pairs_{self.pairs}"] if self.pairs is not None else []
        parts += [f"motif_{self.motif}"] if self.motif > 1 else []
        parts += [f"noise_{100 * self.noise:.0f}"] if self.noise else []
        return "_".join(parts)

    def misfit(self, vocab_size: int) -> str | None:
        """Motifs of one token must do for all pairs."""
        above = self.noise_tokens if self.noise else 0
        least = 2 * ((self.pairs or 1) + 1) + above
        if vocab_size < least or (vocab_size - above) % 2:
            with_noise = f" in addition to the {above} tokens of noise" if above else ""
            return f"needs an even number, at least {least - above}{with_noise}"
        return None

    def generate(self, numbers: np.ndarray, vocab_size: int, seeds: Seeds) -> tuple[np.ndarray, np.ndarray]:
        """Units, each a pair or a token of noise, are laid out in a grid and then moved together."""
        above = self.noise_tokens if self.noise else 0
        half, motif = (vocab_size - above) // 2, self.motif
        pairs = self.pairs or half - 1
        keys = self._motifs(numbers, pairs, half - 1, seeds, "key")
        values = self._motifs(numbers, pairs, half, seeds, "value")
        keys, values = np.where(keys < 0, _ABSENT, keys + 1), np.where(values < 0, _ABSENT, values + half)

        units = self.length if self.noise else -(-self.length // 2)  # of at least 1 or 2 tokens each
        entry = whole(numbers, units, pairs, seeds("entries"))
        key, value = (np.take_along_axis(each, entry[:, :, None], axis=1) for each in (keys, values))
        first = np.full((len(numbers), pairs), units)
        at = np.broadcast_to(np.arange(units), entry.shape)
        rows = np.broadcast_to(np.arange(len(numbers))[:, None], entry.shape)
        share = self.noise * (motif + 1) / (1 - self.noise + self.noise * (motif + 1))  # of units: pairs are longer
        noisy = real(numbers, units, seeds("noise")) < share
        np.minimum.at(first, (rows, entry), np.where(noisy, units, at))

        # right-aligned keys meet left-aligned values, so that the label of each token is the next one in the grid
        grid = np.concatenate([key[:, :, ::-1], value], axis=2)
        labels = np.full_like(grid, NO_LOSS)
        asked = (at > np.take_along_axis(first, entry, axis=1)) & ~noisy
        following = np.where(value < 0, NO_LOSS, value)
        labels[:, :, motif - 1 : -1] = np.where(asked[:, :, None], following, NO_LOSS)
        grid[noisy] = _ABSENT
        grid[noisy, -1] = (vocab_size - above + whole(numbers, units, max(above, 1), seeds("noise tokens")))[noisy]

        grid, labels = grid.reshape(len(numbers), -1), labels.reshape(len(numbers), -1)
        present = np.argsort(grid < 0, axis=1, kind="stable")[:, : self.length]
        return np.take_along_axis(grid, present, axis=1), np.take_along_axis(labels, present, axis=1)

    def _motifs(self, numbers: np.ndarray, count: int, size: int, seeds: Seeds, kind: str) -> np.ndarray:
        """`[n, count, motif]` of 0 … size − 1, in a row all different; −1 marks tokens that a motif lacks."""
        lengths = 1 + whole(numbers, count, self.motif, seeds(f"{kind} lengths"))
        motifs = np.full((*lengths.shape, self.motif), _ABSENT)
        for length in range(1, self.motif + 1):
            # motifs of a length are counted, so that different numbers are different motifs
            code = distinct(numbers, count, size**length, seeds(f"{kind} {length}"))
            digits = code[:, :, None] // size ** np.arange(length) % size
            motifs[:, :, :length] = np.where((lengths == length)[:, :, None], digits, motifs[:, :, :length])
        return motifs


@dataclass(eq=False, repr=False)
class SelectiveCopy(TokenTask):
    """A few tokens among blanks, to be said in their order at the end.

    Token 0 asks, 1 is blank, 2 … V − 1 are content. The first length − copied tokens are blank but for `copied` random
    places with random content; the last `copied` tokens are 0, and their labels are the content in order. (That a token
    may come twice is inferred.)

    Args:
        length: Tokens in a sequence; at least twice `copied`.
        copied: Tokens to copy.
        weight: Relative frequency of training batches of this task.

    Raises:
        UserError: An argument is out of range.
    """

    length: int = 256
    copied: int = 16
    weight: float = 1.0
    named_after = ("length", "copied")

    def __post_init__(self) -> None:
        check_sizes({"copied": self.copied})
        if self.length < (least := 2 * self.copied):
            raise UserError(f"length: {self.length} is too short, copying {self.copied} tokens needs at least {least}")

    def misfit(self, vocab_size: int) -> str | None:
        """Two tokens are special."""
        return None if vocab_size >= 4 else "needs at least 4"

    def generate(self, numbers: np.ndarray, vocab_size: int, seeds: Seeds) -> tuple[np.ndarray, np.ndarray]:
        """Content among blanks, then questions."""
        space = self.length - self.copied
        places = np.sort(distinct(numbers, self.copied, space, seeds("places")), axis=1)
        content = 2 + whole(numbers, self.copied, vocab_size - 2, seeds("content"))
        tokens = np.zeros((len(numbers), self.length), np.int64)
        tokens[:, :space] = 1
        np.put_along_axis(tokens, places, content, axis=1)
        labels = np.full_like(tokens, NO_LOSS)
        labels[:, space:] = content
        return tokens, labels


@dataclass(eq=False, repr=False)
class Compression(TokenTask):
    """Random tokens, which are then queried by their places: the whole sequence must be in the state.

    Token 0 ends what is to be compressed, 1 … `content` are content, and token content + p asks for place p. A sequence
    is `compressed` random contents, the 0, and all places in order, whose labels are what stood there. (MAD decodes the
    last output together with an embedding of each place by an MLP; here the model itself is asked, since a language
    model has no such head. The two agree in what the state must hold.)

    Args:
        compressed: Tokens to compress, in a sequence of twice as many and one.
        content: Size of their vocabulary.
        weight: Relative frequency of training batches of this task.

    Raises:
        UserError: An argument is out of range.
    """

    compressed: int = 32
    content: int = 16
    weight: float = 1.0
    named_after = ("compressed",)

    def __post_init__(self) -> None:
        check_sizes({"compressed": self.compressed})
        check_sizes({"content": self.content}, least=2)
        self.length = 2 * self.compressed + 1

    def misfit(self, vocab_size: int) -> str | None:
        """Each place is a token."""
        least = 1 + self.content + self.compressed
        return None if vocab_size >= least else f"needs at least {least}"

    def generate(self, numbers: np.ndarray, vocab_size: int, seeds: Seeds) -> tuple[np.ndarray, np.ndarray]:
        """Content, the end, places."""
        n = self.compressed
        content = 1 + whole(numbers, n, self.content, seeds("content"))
        places = np.broadcast_to(self.content + np.arange(1, n + 1), content.shape)
        tokens = np.concatenate([content, np.zeros_like(content[:, :1]), places], axis=1)
        return tokens, np.concatenate([np.full((len(numbers), n + 1), NO_LOSS), content], axis=1)


@dataclass(eq=False, repr=False)
class Memorization(TokenTask):
    """Facts that stand in no prompt: each key has one value, the same in all samples, to be learned by heart.

    Token 0 asks, 1 … V/2 − 1 are keys, V/2 … V − 1 values. A sequence is random keys, each followed by 0, whose label
    is the key's value. The values are drawn once, from the seed of the data alone; so a model is evaluated with the
    seed that it was trained with.

    Args:
        length: Tokens in a sequence, an even number.
        weight: Relative frequency of training batches of this task.

    Raises:
        UserError: An argument is out of range.
    """

    length: int = 32
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.length < 2 or self.length % 2:
            raise UserError(f"length: {self.length} must be an even number, at least 2")

    def misfit(self, vocab_size: int) -> str | None:
        """Half of the tokens are values."""
        return "needs an even number, at least 4" if vocab_size % 2 or vocab_size < 4 else None

    def generate(self, numbers: np.ndarray, vocab_size: int, seeds: Seeds) -> tuple[np.ndarray, np.ndarray]:
        """Keys and questions in turn."""
        half = vocab_size // 2
        facts = half + whole(np.zeros(1, np.uint64), half - 1, half, seeds.shared("facts"))[0]
        keys = whole(numbers, self.length // 2, half - 1, seeds("keys"))
        tokens = np.zeros((len(numbers), self.length), np.int64)
        labels = np.full_like(tokens, NO_LOSS)
        tokens[:, ::2], labels[:, 1::2] = keys + 1, facts[keys]
        return tokens, labels


class MadRecall(TokenEvaluation):
    """In-context recall (`InContextRecall`) with all keys of the vocabulary."""

    name = "mad_recall"
    measures = "MAD: values of keys that came before"
    data, shortest, default_lengths = InContextRecall, 4, (64, 128, 256)


class MadFuzzy(TokenEvaluation):
    """Fuzzy recall (`InContextRecall` with motifs), as in mad_tasks/fuzzy.yaml."""

    name = "mad_fuzzy"
    measures = "MAD: the same with keys and values of one to three tokens"
    data, shortest, default_lengths = partial(InContextRecall, pairs=4, motif=3), 12, (64, 128, 256)


class MadNoisy(TokenEvaluation):
    """Noisy recall (`InContextRecall` with noise), as in mad_tasks/noisy.yaml."""

    name = "mad_noisy"
    measures = "MAD: the same with a fifth of noise, in 16 tokens on top of the vocabulary"
    data, shortest, default_lengths = partial(InContextRecall, noise=0.2), 4, (64, 128, 256)


class MadCopy(TokenEvaluation):
    """Selective copying (`SelectiveCopy`) of 16 tokens, whatever the length."""

    name = "mad_copy"
    measures = "MAD: 16 tokens among blanks, in their order"
    data, shortest, default_lengths = partial(SelectiveCopy, copied=16), 32, (128, 256, 512)


class MadCompression(TokenEvaluation):
    """Compression (`Compression`) of about half of the length, asked of the model itself."""

    name = "mad_compression"
    measures = "MAD: each of the tokens before, by its place"
    shortest, default_lengths = 3, (17, 33, 65)

    def task(self, cell: Cell) -> TokenTask:
        """The data's task of a cell."""
        return Compression((cell["length"] - 1) // 2)

    def sizes(self, length: int) -> list[Cell]:
        """An odd length: the tokens, the end, and as many places."""
        return [{"length": length - 1 + length % 2}]


class MadMemorization(TokenEvaluation):
    """Memorisation (`Memorization`), with the seed that the facts were trained with."""

    name = "mad_memorization"
    measures = "MAD: facts learned by heart; --seed must be the data.seed of the training"
    data, shortest, default_lengths = Memorization, 2, (32,)

    def sizes(self, length: int) -> list[Cell]:
        """An even length."""
        return [{"length": length - length % 2}]


TASKS: tuple[type[Task], ...] = (MadRecall, MadFuzzy, MadNoisy, MadCopy, MadCompression, MadMemorization)
