"""Several sources mixed by weight: their documents for a tokenizer, and their samples for training."""

import hashlib
import json
from collections.abc import Iterator, Sequence

import numpy as np

from zoo.data.batch import Batch
from zoo.data.order import interleaved, whole_weights
from zoo.data.text.packing import Windows
from zoo.data.text.tokenizer import Documents, training_pieces


class BlendedText:
    """Pieces of the documents of several corpora; at any point, each corpus has contributed its share of characters.

    Each corpus is read at least once; one that ends early is repeated, as in training.
    """

    def __init__(self, corpora: Sequence[Documents], weights: Sequence[float]) -> None:
        self.corpora, self.weights = list(corpora), whole_weights(weights)

    def __str__(self) -> str:
        return "data.sources"

    def signature(self) -> str:
        """A hash that changes when a file or a weight does."""
        signatures = [corpus.signature() for corpus in self.corpora]
        return hashlib.sha256(json.dumps([signatures, self.weights]).encode()).hexdigest()

    def __iter__(self) -> Iterator[str]:
        characters = [0] * len(self.corpora)
        texts = [_pieces(corpus) for corpus in self.corpora]
        unfinished = set(range(len(self.corpora)))  # not read to the end once
        while unfinished:
            behind = min(range(len(characters)), key=lambda source: characters[source] / self.weights[source])
            piece = next(texts[behind], None)
            if piece is None:
                unfinished.discard(behind)
                texts[behind] = _pieces(self.corpora[behind])
            else:
                characters[behind] += len(piece)
                yield piece


class Blend:
    """The training samples of several sources, mixed by weight into one endless stream.

    Each source is reshuffled for each of its passes, and repeated as often as its weight requires.
    """

    def __init__(self, sources: Sequence[Windows], weights: Sequence[float]) -> None:
        self.sources, self.weights = list(sources), whole_weights(weights)
        self._first = np.cumsum([0, *map(len, sources)])  # the number of each source's first sample

    def __len__(self) -> int:
        """Total number of samples of all sources."""
        return int(self._first[-1])

    def order(self, positions: np.ndarray, seed: int) -> np.ndarray:
        """The sample at each position of the endless stream: `[n]` → `[n]` int64."""
        sources, numbers = interleaved(positions, self.weights, seed)
        samples = np.empty_like(numbers)
        for source, windows in enumerate(self.sources):
            from_source = sources == source
            if from_source.any():
                samples[from_source] = self._first[source] + windows.order(numbers[from_source], seed + source)
        return samples

    def batch(self, indices: Sequence[int]) -> Batch:
        """A batch of the samples with these numbers, in this order."""
        sources = np.searchsorted(self._first, indices, side="right") - 1
        pairs = zip(sources.tolist(), indices, strict=True)
        samples = [self.sources[source][index - int(self._first[source])] for source, index in pairs]
        return self.sources[0].collate(samples)

    def passes(self, samples: int) -> list[float]:
        """Number of passes over each source in the first `samples` samples of the stream."""
        shares = [samples * weight / sum(self.weights) for weight in self.weights]
        return [share / len(windows) for share, windows in zip(shares, self.sources, strict=True)]


def _pieces(corpus: Documents) -> Iterator[str]:
    for text in corpus:
        yield from training_pieces(text)
