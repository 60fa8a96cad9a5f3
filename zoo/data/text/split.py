"""The split into training and validation, by document and by its text alone."""

import hashlib
import logging
from collections.abc import Iterator
from typing import Literal, overload

from kernels.errors import UserError
from zoo.data.text.corpus import Corpus
from zoo.data.text.documents import Document, Tokens

log = logging.getLogger(__name__)

Split = Literal["train", "validation"]
SPLITS: tuple[Split, Split] = ("train", "validation")


class SplitByContent:
    """Splits documents by a threshold on the hash of their text, moved if a split would be empty.

    The expected fraction of them is for validation; None: all are. The corpus is read once.
    """

    def __init__(self, corpus: Corpus, fraction: float | None) -> None:
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
        self._fraction = fraction
        self.single = fraction is not None and smallest == largest  # one document, possibly repeated, to be cut
        if fraction is None:
            self._threshold = 1 << 64
            return
        # hashes below the threshold go to validation: at least the smallest, never the largest
        self._threshold = min(max(int(fraction * 2.0**64), smallest + 1), largest)
        if self.single:
            log.info("%s is a single document: its head is used for training, its tail for validation.", corpus)

    @overload
    def __call__(self, text: str) -> Iterator[tuple[Split, str]]: ...

    @overload
    def __call__(self, text: Document) -> Iterator[tuple[Split, Document]]: ...

    def __call__(self, text: Document) -> Iterator[tuple[Split, Document]]:
        """Yield the document's split and the document; for a single document, its two parts.

        Raises:
            UserError: A single document is too short to cut.
        """
        if not self.single or self._fraction is None:
            yield ("validation" if content_hash(text) < self._threshold else "train"), text
            return
        if len(text) < 2:
            raise UserError(
                f"{self._corpus} is a single character; at least two are needed for training and validation."
            )
        cut = min(max(round(len(text) * (1 - self._fraction)), 1), len(text) - 1)
        if isinstance(text, Tokens):
            for split, part in zip(SPLITS, (slice(cut), slice(cut, None)), strict=True):
                yield split, Tokens(text.ids[part])
            return
        line = text.rfind("\n", 0, cut) + 1  # preferably at the end of a line, if one is near
        cut = line if line > cut - 1000 and line > 0 else cut
        yield "train", text[:cut]
        yield "validation", text[cut:]


def content_hash(text: Document) -> int:
    """The 64-bit hash that decides the split of a document."""
    content = text.encode() if isinstance(text, str) else text.content()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())
