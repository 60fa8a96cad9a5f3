"""Sentences of running text."""

import re
import textwrap
from collections.abc import Iterable, Iterator

LONGEST = 300  # characters; a longer piece without a full stop is cut between words
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
                    yield from textwrap.wrap(sentence, LONGEST, break_on_hyphens=False)
