"""Prompts of an exact number of tokens: filler text with needles at given depths."""

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from zoo.data.text.tokenizer import Tokenizer

# Appended to the last sentence of filler until the number of tokens is right; for bytes a full stop is one step.
_PADDING = (" the", " of", " and", " a", " I", ".", ",", "!", "s", "e")
_NEIGHBOURS = 200  # characters on each side of a change that may be tokenised differently because of it
_ATTEMPTS = 4
_FEWER_WORDS = 4


class Placed(NamedTuple):
    """A sentence in a haystack, and the share of the filler that comes before it, 0 … 1."""

    text: str
    depth: float


class Haystack:
    """Builds prompts for one tokenizer, with `separator` between two sentences."""

    def __init__(self, tokenizer: Tokenizer, separator: str) -> None:
        self.tokenizer, self.separator = tokenizer, separator
        self._cost = lru_cache(maxsize=100_000)(lambda sentence: self._count(separator + sentence))

    def smallest(self, head: str, placed: Sequence[Placed], tail: str) -> int:
        """Tokens of a prompt without filler."""
        return len(self._ids(head + self.separator.join(sentence.text for sentence in placed) + tail))

    def prompt(
        self,
        length: int,
        head: str,
        placed: Sequence[Placed],
        tail: str,
        filler: Iterator[str],
        rest: Iterator[str] | None = None,
    ) -> list[int]:
        """Token ids of `head`, a haystack and `tail`, encoded as one text.

        The haystack consists of whole sentences of `filler`. A last sentence is cut between words, and padded with a
        few short words or full stops, so that the length is exact; where a tokenizer cannot, it is the nearest below.

        Args:
            length: Tokens of the whole prompt, including the start token (if there is one) and `tail`.
            head: The text before the haystack.
            placed: Sentences that go to certain depths of the filler.
            tail: The text after the haystack.
            filler: Sentences without end.
            rest: The sentences from which the last one is made. None: `filler`.

        Returns:
            At most `length` ids, unless `smallest` is above that.
        """
        sentences: list[str] = []
        room = length - self.smallest(head, placed, tail)
        while (cost := self._cost(sentence := next(filler))) <= room:
            sentences.append(sentence)
            room -= cost
        source = itertools.chain([] if rest else [sentence], rest or filler)
        prompts = []
        for _ in range(_ATTEMPTS):
            before, after, opens = self._around_the_last(head, sentences, placed, tail, room)
            prompts.append(self._filled(length, before, after, opens, source))
            if len(prompts[-1]) == length or not sentences:
                break
            room = self._cost(sentences.pop())  # more room for the last sentence
        return max(prompts, key=lambda ids: len(ids) if len(ids) <= length else 0)

    def _around_the_last(
        self, head: str, sentences: Sequence[str], placed: Sequence[Placed], tail: str, room: int
    ) -> tuple[str, str, bool]:
        """The text before and after the last sentence, of about `room` tokens, and whether that opens the haystack."""
        ends = np.cumsum([0, *map(self._cost, sentences), max(room, 1)])  # so that depth 1 is after the last one
        units: list[str | None] = [*sentences, None]  # None: the last one
        for needle in sorted(placed, key=lambda needle: needle.depth, reverse=True):
            units.insert(int(np.abs(ends - needle.depth * ends[-1]).argmin()), needle.text)
        place = units.index(None)
        before, after = (self.separator.join(filter(None, part)) for part in (units[:place], units[place + 1 :]))
        between = self.separator if before and after else ""
        return head + before, between + after + tail, not before

    def _filled(self, length: int, before: str, after: str, opens: bool, source: Iterator[str]) -> list[int]:
        """The prompt with a last sentence that makes it `length` tokens long, or the nearest below."""
        best = self._ids(before + after)
        missing = length - len(best)
        left, right = before[-_NEIGHBOURS:], after[:_NEIGHBOURS]
        bare = self._count(left + right)
        words: list[str] = []

        def complete(text: str) -> str:
            return "" if not text else text + self.separator if opens else self.separator + text

        def cost(text: str) -> int:
            return self._count(left + complete(text) + right) - bare

        for _ in range(_ATTEMPTS):  # what is true of the neighbourhood may be wrong by a token in the whole
            if missing <= 0:
                break
            while cost(" ".join(words)) < missing:
                words += next(source).split(" ")
            ids = self._ids(before + complete(_of_cost(missing, words, cost)) + after)
            if len(best) < len(ids) <= length:
                best = ids
            if len(ids) == length:
                break
            missing += length - len(ids)
        return best

    def _count(self, text: str) -> int:
        return len(self.tokenizer.encode(text))

    def _ids(self, text: str) -> list[int]:
        start = [] if self.tokenizer.bos_id is None else [self.tokenizer.bos_id]
        return start + self.tokenizer.encode(text)


def _of_cost(target: int, words: Sequence[str], cost: Callable[[str], int]) -> str:
    """The first words, then padding: a text that costs `target`, or the most below that was found."""
    most = bisect_right(range(1, len(words) + 1), target, key=lambda count: cost(" ".join(words[:count])))
    candidates = []
    for count in range(most, max(most - _FEWER_WORDS, -1), -1):
        candidates.append(_padded(" ".join(words[:count]), target, cost))
        if candidates[-1][0] == target:
            break
    return max(candidates)[1]


def _padded(text: str, target: int, cost: Callable[[str], int]) -> tuple[int, str]:
    """The text with padding, and what it costs then."""
    total = cost(text)
    while total < target:
        longer = [text + padding for padding in _PADDING if not text.endswith(padding)]
        steps = [(after, text) for text in longer if total < (after := cost(text)) <= target]
        if not steps:
            break
        total, text = min(steps, key=lambda step: step[0])
    return total, text
