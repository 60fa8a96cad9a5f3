"""The base of all tasks that hide a needle in a haystack and ask for it."""

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal

from kernels import UserError
from zoo.data import Corpus
from zoo.data.synthetic.recall import number_of
from zoo.data.text.needle_documents import sentences
from zoo.data.text.needles import KEYS, NOISE, Needle, Wording, draw_needles, mentions
from zoo.data.text.tokenizer import Tokenizer
from zoo.evaluation.loaded import LoadedModel
from zoo.evaluation.task import Cell, Options, Row, Task, proportion
from zoo.evaluation.tasks.haystack import Haystack, Placed

_DEPTHS = 40  # of which one is drawn for each needle, evenly spaced from 0 to 1, as in RULER
_MOST_SENTENCES = 50_000  # of the user's text; a haystack of a million tokens needs about that many
_PROMPTS = 64  # made at a time


class NeedleTask(Task):
    """Recall of one needle.

    `length` counts all tokens of the prompt: the start token, the haystack, the question and the beginning of the
    answer, but not the answer. An answer is right if the continuation contains the value, in upper or lower case. A
    sample has the same needles at the same depths at all lengths, and its filler starts with the same sentence, so that
    lengths differ only in how much text surrounds the needles.

    Attributes:
        wording: How needles are stated and queried.
        text: The haystack: sentences of text, lines of noise, or other needles.
        needles: How many are hidden; one of them is queried.
        max_new_tokens: Tokens of a continuation.
        default_lengths, default_samples, default_depths: What is used if the user sets nothing. Default lengths into
            which the question does not fit are left out; without depths, each sample has a different one.
    """

    wording: ClassVar[Wording]
    text: ClassVar[Literal["text", "noise", "needles"]] = "text"
    needles: ClassVar[int] = 1
    max_new_tokens: ClassVar[int] = 128
    default_lengths: ClassVar[tuple[int, ...]] = (256, 512, 1024, 2048)
    default_samples: ClassVar[int] = 50
    default_depths: ClassVar[tuple[float, ...] | None] = None
    needs = "a tokenizer"
    version = 2  # 1 drew depths and filler anew for each length

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.samples = self.default_samples if options.samples is None else options.samples
        depths = options.depths or self.default_depths
        self.places: list[Cell] = [{}] if depths is None else [{"depth": depth} for depth in sorted(depths)]
        self._sentences: list[str] = []
        self._built: Haystack | None = None

    @property
    def uses(self) -> tuple[str, ...]:
        return ("depths", "haystack") if self.text == "text" else ("depths",)

    def cells(self, subject: LoadedModel) -> list[Cell]:
        """A cell for each length, or for each length and depth.

        Raises:
            UserError: The model has no tokenizer, the haystack cannot be read, or a length is too small or too large.
        """
        return [{"length": length, **place} for length in self.lengths(subject) for place in self.places]

    def run(self, subject: LoadedModel, cell: Cell) -> list[Row]:
        """The share of right answers."""
        return [self.accuracy(cell, self.answers(subject, [(cell, number) for number in range(self.samples)]))]

    def accuracy(self, cell: Cell, right: Sequence[bool]) -> Row:
        """The row of a cell."""
        return {**cell, "metric": "accuracy", **proportion(sum(right), len(right))}

    def lengths(self, subject: LoadedModel) -> list[int]:
        """The lengths to evaluate, once it is known that they are possible."""
        tokenizer = self._tokenizer(subject)
        if self.text == "text":
            self._texts()
        smallest = max(
            self._smallest(tokenizer, place, number) for place in self.places for number in range(self.samples)
        )
        if not self.options.lengths:
            fitting = [length for length in self.default_lengths if length >= smallest]
            return fitting or [2 * smallest]
        for length in self.options.lengths:
            if length < smallest:
                raise UserError(
                    f"{self.name}: a length of {length} tokens is too small for the question and the needle with this "
                    f"tokenizer; the smallest possible length is {smallest}."
                )
        if self.text == "needles":
            needle = next(draw_needles(random.Random(0), self.wording.kind, "evaluation"))
            largest = KEYS * len(tokenizer.encode(self.wording.state(needle))) // 2  # they differ in length
            if max(self.options.lengths) > largest:
                raise UserError(
                    f"{self.name}: a length of {max(self.options.lengths)} tokens needs more needles than there are "
                    f"different keys ({KEYS}); the largest possible length is {largest}."
                )
        return list(self.options.lengths)

    def answers(self, subject: LoadedModel, samples: Sequence[tuple[Cell, int]]) -> list[bool]:
        """Return whether the answer to each sample, a cell and a number, is right."""
        tokenizer, right = self._tokenizer(subject), []
        for first in range(0, len(samples), _PROMPTS):
            prompts = [self.sample(tokenizer, *sample) for sample in samples[first : first + _PROMPTS]]
            continuations = subject.continuations([prompt for prompt, _ in prompts], self.max_new_tokens)
            texts = [tokenizer.decode(ids).casefold() for ids in continuations]
            right += [value in text for (_, value), text in zip(prompts, texts, strict=True)]
        return right

    def sample(self, tokenizer: Tokenizer, cell: Cell, number: int) -> tuple[list[int], str]:
        """Return the prompt of a sample and the value that it asks for: a function of seed, task, cell and number."""
        needles, asked = self._drawn(cell, number)
        rng = random.Random(number_of("haystack", self.name, self.options.seed, cell.get("depth"), number))
        depths = {needle: rng.randrange(_DEPTHS) / (_DEPTHS - 1) for needle in needles}
        depths[asked] = cell.get("depth", depths[asked])
        prompt = self._haystack(tokenizer).prompt(
            cell["length"],
            self.wording.head,
            [Placed(self.wording.state(needle), depth) for needle, depth in depths.items()],
            self.wording.ask(asked),
            self._filler(rng, needles),
            itertools.repeat(NOISE) if self.text == "needles" else None,
        )
        return prompt, asked.value

    def _drawn(self, cell: Cell, number: int) -> tuple[list[Needle], Needle]:
        """The needles of a sample, and the one that is queried."""
        rng = random.Random(number_of("needles", self.name, self.options.seed, cell.get("depth"), number))
        needles = list(itertools.islice(draw_needles(rng, self.wording.kind, "evaluation"), self.needles))
        return needles, rng.choice(needles)

    def _smallest(self, tokenizer: Tokenizer, cell: Cell, number: int) -> int:
        """Tokens of a sample's prompt without filler."""
        needles, asked = self._drawn(cell, number)
        placed = [Placed(self.wording.state(needle), 0.0) for needle in needles]
        return self._haystack(tokenizer).smallest(self.wording.head, placed, self.wording.ask(asked))

    def _haystack(self, tokenizer: Tokenizer) -> Haystack:
        if self._built is None or self._built.tokenizer is not tokenizer:
            self._built = Haystack(tokenizer, " " if self.text == "text" else "\n")
        return self._built

    def _filler(self, rng: random.Random, needles: list[Needle]) -> Iterator[str]:
        """Sentences without end that mention no needle."""
        if self.text == "noise":
            return itertools.repeat(NOISE)
        lines: Iterator[str]
        if self.text == "needles":
            lines = map(self.wording.state, draw_needles(rng, self.wording.kind, "evaluation"))
        else:
            texts = self._texts()
            start = rng.randrange(len(texts))
            lines = itertools.cycle(itertools.chain(texts[start:], texts[:start]))
        return (line for line in lines if not mentions(line, needles))

    def _texts(self) -> list[str]:
        """The sentences of the haystack."""
        if not self._sentences:
            corpus = Corpus(self.options.haystack or "embedded:documentation", max_characters=None, key="haystack")
            self._sentences = list(itertools.islice(sentences(corpus.texts()), _MOST_SENTENCES))
            if not self._sentences:
                raise UserError(f"{corpus} has no sentences, only indented lines, headings or tables.")
        return self._sentences

    def _tokenizer(self, subject: LoadedModel) -> Tokenizer:
        if subject.tokenizer is None:
            raise UserError(f"{self.name}: {subject.name} was saved without a tokenizer; it cannot read questions")
        return subject.tokenizer
