"""Train and validation, split by document and by nothing but its text."""

import hashlib
import logging
from collections.abc import Iterator
from typing import Literal

from kernels.errors import UserError
from zoo.data.text.corpus import Corpus

log = logging.getLogger(__name__)

Split = Literal["train", "validation"]
SPLITS: tuple[Split, Split] = ("train", "validation")


class SplitByContent:
    """Which side a document is on: a threshold on the hash of its text, moved if a side would be empty."""

    def __init__(self, corpus: Corpus, fraction: float) -> None:
        smallest, largest, self.characters, self.digest = 1 << 64, -1, 0, hashlib.sha256()
        for text in corpus:
            number = content_hash(text)
            smallest, largest = min(smallest, number), max(largest, number)
            self.characters += len(text)
            self.digest.update(number.to_bytes(8))
        self._corpus = corpus
        self.single = smallest == largest  # one document, or copies of it
        self._fraction = fraction
        # Below the threshold is validation: at least the smallest hash, never the largest.
        self._threshold = min(max(int(fraction * 2.0**64), smallest + 1), largest)
        if self.single:
            log.info("%s is a single document: its head is for training, its tail for validation.", corpus)

    def __call__(self, text: str) -> Iterator[tuple[Split, str]]:
        """The document and its side; two parts of a single document."""
        if not self.single:
            yield ("validation" if content_hash(text) < self._threshold else "train"), text
            return
        if len(text) < 2:
            raise UserError(f"{self._corpus} is a single character; at least two are needed to train and to validate.")
        cut = min(max(round(len(text) * (1 - self._fraction)), 1), len(text) - 1)
        line = text.rfind("\n", 0, cut) + 1  # a whole line is nicer, if one ends not far away
        cut = line if line > cut - 1000 and line > 0 else cut
        yield "train", text[:cut]
        yield "validation", text[cut:]


def content_hash(text: str) -> int:
    """64 bits that decide about a document."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
