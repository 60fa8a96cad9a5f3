"""Sentences of running text, and documents that train recall: needles in text, in noise and among other needles, with
questions and answers.
"""

import itertools
import math
import random
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from zoo.data.synthetic.recall import number_of
from zoo.data.text.needles import (
    EASY,
    KEYS,
    NOISE,
    NUMBERS,
    PASSKEY,
    RECORDS,
    STANDARD,
    UUIDS,
    Needle,
    draw_needles,
    mentions,
)

LONGEST_SENTENCE = 300  # characters; a longer piece without a full stop is cut between words
_PARAGRAPHS = re.compile(r"\n\s*\n")
_ENDS = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'(“])")
_NO_PROSE = re.compile(r"^[ \t]|[*=+~^_|-]{4,}", re.MULTILINE)  # indented lines, underlines, rulers and tables


def sentences(documents: Iterable[str]) -> Iterator[str]:
    """Yield the sentences of documents in order, each on one line of at most 300 characters.

    Paragraphs end at blank lines. Those with indented lines, underlines or rulers (code, lists, headings, tables) are
    left out.
    """
    for document in documents:
        for paragraph in _PARAGRAPHS.split(document):
            if not _NO_PROSE.search(paragraph.strip("\n")):
                for sentence in _ENDS.split(" ".join(paragraph.split())):
                    yield from textwrap.wrap(sentence, LONGEST_SENTENCE, break_on_hyphens=False)


FORMAT = 1  # of the documents; goes up when they change
SHORTEST = 200  # characters of haystack
LONGEST = 2000  # characters of haystack, unless the path of the source says otherwise
_QUESTIONS = 4  # at most, for each document
_WORDINGS = (NUMBERS, NUMBERS, UUIDS, EASY, STANDARD)


def needle_documents(sentences: Sequence[str], longest: int = LONGEST) -> Iterator[str]:
    """Yield documents without end, the same each time: document i is a function of i, `sentences` and `longest`.

    A document states needles in a haystack of text, noise or other needles, or as a list of records, then asks for up
    to four of them and answers. Its haystack has 200 … `longest` characters, equally likely on a logarithmic scale. An
    answer occurs only in its needle and after its question, and is never a value that evaluation uses.
    """
    for number in itertools.count():
        yield _document(random.Random(number_of("needle documents", number)), sentences, longest)


def _document(rng: random.Random, sentences: Sequence[str], longest: int) -> str:
    size = int(math.exp(rng.uniform(math.log(SHORTEST), math.log(longest + 1))))
    style = rng.choice(("records", "needles", "noise", "text", "passkey"))
    wording = {"records": RECORDS, "passkey": PASSKEY}.get(style) or rng.choice(_WORDINGS)
    packed = style in ("records", "needles")  # there is nothing but needles
    if packed:
        example = next(draw_needles(rng, wording.kind, "training"))
        count = min(max(size // len(wording.state(example)), 1), KEYS)
    else:
        count = 1 if style == "passkey" else rng.randint(1, _QUESTIONS)
    needles = list(itertools.islice(draw_needles(rng, wording.kind, "training"), count))
    separator = " " if style == "text" else "\n"
    filler = [] if packed else _filler(rng, sentences if style == "text" else [NOISE], size, needles)
    for needle in needles:
        filler.insert(rng.randint(0, len(filler)), wording.state(needle))
    asked = rng.sample(needles, min(count, _QUESTIONS))
    answers = [wording.ask(needle) + wording.reply(needle) for needle in asked]
    return wording.head + separator.join(filler) + "".join(answers)


def _filler(rng: random.Random, sentences: Sequence[str], size: int, needles: Sequence[Needle]) -> list[str]:
    """Consecutive sentences with `size` characters in all, without those that mention a needle."""
    filler: list[str] = []
    place = rng.randrange(len(sentences))
    while size > 0:
        sentence = sentences[place % len(sentences)]
        place, size = place + 1, size - len(sentence)
        if not mentions(sentence, needles):
            filler.append(sentence)
    return filler
