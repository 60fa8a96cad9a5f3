"""The split into training, validation and test, by document and by its text alone."""

import hashlib
import json
import logging
from collections.abc import Iterator
from typing import Literal, overload

from kernels.errors import UserError
from zoo.data.text.corpus import Corpus
from zoo.data.text.documents import Document, Tokens
from zoo.data.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


class SplitByContent:
    """Splits documents by thresholds on the hash of their text, moved if a split would be empty.

    The expected fraction of them is for validation; None: all are. A test split is taken out of the training split, so
    that the validation split is the same with and without one. The corpus is read once.
    """

    def __init__(self, corpus: Corpus, fraction: float | None, test_fraction: float | None = None) -> None:
        smallest, largest, self.characters, self.digest = 1 << 64, -1, 0, hashlib.sha256()
        self.largest_token = -1  # of documents that are tokens
        for text in corpus:
            if isinstance(text, Tokens):
                self.largest_token = max(self.largest_token, int(text.ids.max()))
            number = content_hash(text)
            smallest, largest = min(smallest, number), max(largest, number)
            self.characters += len(text)
            self.digest.update(number.to_bytes(8))
        self._corpus = corpus
        self._fraction, self._test_fraction = fraction, test_fraction
        self._test_threshold = 1 << 64 if test_fraction is None else min(int((1 - test_fraction) * 2.0**64), largest)
        self.single = fraction is not None and smallest == largest  # one document, possibly repeated, to be cut
        if fraction is None:
            self._threshold = 1 << 64
            return
        # hashes below the threshold go to validation: at least the smallest, never the largest
        self._threshold = min(max(int(fraction * 2.0**64), smallest + 1), largest)
        if self.single:
            parts = "tail for validation" if test_fraction is None else "tail for test and validation"
            log.info("%s is a single document: its head is used for training, its %s.", corpus, parts)

    @overload
    def __call__(self, text: str) -> Iterator[tuple[Split, str]]: ...

    @overload
    def __call__(self, text: Document) -> Iterator[tuple[Split, Document]]: ...

    def __call__(self, text: Document) -> Iterator[tuple[Split, Document]]:
        """Yield the document's split and the document; for a single document, its parts.

        Raises:
            UserError: A single document is too short to cut.
        """
        if not self.single or self._fraction is None:
            number = content_hash(text)
            outside: Split = "test" if number >= self._test_threshold else "train"
            yield ("validation" if number < self._threshold else outside), text
            return
        head, tail = self._cut(text, self._fraction)
        if self._test_fraction is not None:
            head, test = self._cut(head, self._test_fraction / (1 - self._fraction))
            yield "test", test
        yield "train", head
        yield "validation", tail

    def _cut(self, text: Document, share: float) -> tuple[Document, Document]:
        """The head and the tail of a text; the tail has the share, and begins with a line if one is near."""
        if len(text) < 2:
            splits = "training and validation" if self._test_fraction is None else "training, validation and test"
            raise UserError(f"{self._corpus} is a single character; more are needed for {splits}.")
        cut = min(max(round(len(text) * (1 - share)), 1), len(text) - 1)
        if isinstance(text, Tokens):
            return Tokens(text.ids[:cut]), Tokens(text.ids[cut:])
        line = text.rfind("\n", 0, cut) + 1
        cut = line if line > cut - 1000 and line > 0 else cut
        return text[:cut], text[cut:]


class WithoutTest:
    """The documents of a corpus that are not in its test split, on which a tokenizer is trained."""

    def __init__(self, corpus: Corpus, fraction: float, test_fraction: float) -> None:
        self._corpus, self._fractions = corpus, (fraction, test_fraction)

    def __str__(self) -> str:
        return str(self._corpus)

    def signature(self) -> str:
        """A hash that changes when a document or the split does."""
        return hashlib.sha256(json.dumps([self._corpus.signature(), *self._fractions]).encode()).hexdigest()

    def __iter__(self) -> Iterator[Document]:
        sides = SplitByContent(self._corpus, *self._fractions)
        for text in self._corpus:
            yield from (part for split, part in sides(text) if split != "test")


def content_hash(text: Document) -> int:
    """The 64-bit hash that decides the split of a document."""
    content = text.encode() if isinstance(text, str) else text.content()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())


HELD_OUT = 0.05  # TextData's default, so that the embedded text is what such a run was not trained on


def held_out_tokens(corpus: Corpus, tokenizer: Tokenizer, fraction: float = HELD_OUT) -> Iterator[int]:
    """Yield the tokens of the validation split of a text, or of all text if its fraction is 1.

    Each document ends by its end token.
    """
    split = SplitByContent(corpus, fraction if fraction < 1 else None)
    for text in corpus.texts():
        for part, held_out in split(text):
            if part == "validation":
                yield from [*([] if tokenizer.bos_id is None else [tokenizer.bos_id]), *tokenizer.encode(held_out)]
                yield tokenizer.eos_id
