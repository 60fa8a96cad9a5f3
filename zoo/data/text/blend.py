"""Several sources as one: their documents for a tokenizer, and their samples for training, by weight."""

import hashlib
import json
from collections.abc import Iterator, Sequence

import numpy as np

from zoo.data.batch import Batch
from zoo.data.order import interleaved, whole_weights
from zoo.data.text.corpus import Corpus
from zoo.data.text.packing import Windows
from zoo.data.text.tokenizer import training_pieces


class BlendedText:
    """The documents of several corpora in pieces, so that each has given its share of the characters at any time.

    Each corpus is gone through at least once; one that ends begins again meanwhile, as it does in training.

    Args:
        corpora: The documents.
        weights: Their shares of the characters, above 0, in any unit.
    """

    def __init__(self, corpora: Sequence[Corpus], weights: Sequence[float]) -> None:
        self.corpora, self.weights = list(corpora), whole_weights(weights)

    def __str__(self) -> str:
        return "data.sources"

    def signature(self) -> str:
        """A hash that changes when a file or a weight does."""
        own = [corpus.signature() for corpus in self.corpora]
        return hashlib.sha256(json.dumps([own, self.weights]).encode()).hexdigest()

    def __iter__(self) -> Iterator[str]:
        given = [0] * len(self.corpora)
        texts = [_pieces(corpus) for corpus in self.corpora]
        waiting = set(range(len(self.corpora)))  # not gone through yet
        while waiting:
            behind = min(range(len(given)), key=lambda source: given[source] / self.weights[source])
            piece = next(texts[behind], None)
            if piece is None:
                waiting.discard(behind)
                texts[behind] = _pieces(self.corpora[behind])
            else:
                given[behind] += len(piece)
                yield piece


class Blend:
    """The training samples of several sources as one endless stream, mixed by weight.

    Each source is shuffled anew for each of its passes, and comes round as often as its weight asks for.

    Args:
        sources: Their windows, all cut and packed alike.
        weights: Their shares of the samples, above 0, in any unit.
    """

    def __init__(self, sources: Sequence[Windows], weights: Sequence[float]) -> None:
        self.sources, self.weights = list(sources), whole_weights(weights)
        self._first = np.cumsum([0, *map(len, sources)])  # the number of each source's first sample

    def __len__(self) -> int:
        """The samples of all sources together."""
        return int(self._first[-1])

    def order(self, positions: np.ndarray, seed: int) -> np.ndarray:
        """Which sample comes at each position of the endless stream: `[n]` → `[n]` int64."""
        sources, numbers = interleaved(positions, self.weights, seed)
        samples = np.empty_like(numbers)
        for source, windows in enumerate(self.sources):
            own = sources == source
            if own.any():
                samples[own] = self._first[source] + windows.order(numbers[own], seed + source)
        return samples

    def batch(self, indices: Sequence[int]) -> Batch:
        """The samples with these numbers, in this order."""
        sources = np.searchsorted(self._first, indices, side="right") - 1
        pairs = zip(sources.tolist(), indices, strict=True)
        samples = [self.sources[source][index - int(self._first[source])] for source, index in pairs]
        return self.sources[0].collate(samples)

    def passes(self, samples: int) -> list[float]:
        """How often each source has come round after so many samples of the stream."""
        shares = [samples * weight / sum(self.weights) for weight in self.weights]
        return [share / len(windows) for share, windows in zip(shares, self.sources, strict=True)]


def _pieces(corpus: Corpus) -> Iterator[str]:
    for text in corpus:
        yield from training_pieces(text)
