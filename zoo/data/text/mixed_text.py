"""Text data from several sources mixed by weight: their documents for a tokenizer, and their samples for training."""

import hashlib
import json
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kernels.errors import UserError
from zoo.data.batch import Batch
from zoo.data.loader import ValidationLoader
from zoo.data.order import interleaved, whole_weights
from zoo.data.resumable import check_minimum
from zoo.data.text.corpus import Corpus
from zoo.data.text.packing import Windows
from zoo.data.text.tokenised_text import TokenisedText, check_names, errors_name
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


log = logging.getLogger(__name__)

_MANY_PASSES = 4  # returns diminish beyond (arXiv 2305.16264)


@dataclass(frozen=True)
class Source:
    """One source of a mixture.

    Args:
        path: As `TextData.path`: files, folders or a data set. Null: the embedded corpus, of which "embedded:library"
            and "embedded:documentation" are parts; "embedded:packages": all installed packages. "synthetic:needles":
            documents that train recall.
        weight: Its relative share of the training samples.
        text_field: Field or column of JSON and Parquet files with the text.
        max_characters: Size of the embedded corpus, of the named part or of the synthetic text; null: all of it.
        suffixes: As `TextData.suffixes`.
    """

    path: str | list[str] | None = None
    weight: float = 1.0
    text_field: str = "text"
    max_characters: int | None = 5_000_000
    suffixes: list[str] | None = None


@dataclass(eq=False, repr=False)
class MixedText(TokenisedText):
    """Text from several sources, mixed by weight, that can be resumed at any step with any number of devices.

    In any long stretch of training, a source's share of the samples is given by its weight, whatever its size: a small
    source is repeated more often, reshuffled for each pass. The order is a function of the seed and of one integer, the
    number of samples seen, which checkpoints hold. Validation covers each source separately, and all of them together.

    The other arguments are those of `TokenisedText`.

    Args:
        sources: Name → path and weight. Metrics are named after the names.

    Raises:
        UserError: An argument is out of range, a file cannot be used, or a checkpoint is of other data.
    """

    overfit_hint = "set data.sources to small files"

    sources: dict[str, Source]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.sources:
            raise UserError("data.sources is empty; give at least one, such as {books: {path: books/, weight: 2}}.")
        check_names("sources", self.sources)
        for name, source in self.sources.items():
            if not 0 < source.weight < math.inf:
                raise UserError(f"data.sources.{name}.weight is {source.weight}; it must be above 0, and finite.")
            check_minimum(**{f"sources.{name}.max_characters": (source.max_characters, 1)})
        if twice := sorted({*self.sources} & {*self.extra_sets}):
            raise UserError(f"data.validation_sets: {twice[0]!r} is also the name of a source; give it another.")
        self.sources = dict(self.sources)
        self.corpora = [
            Corpus(source.path, source.text_field, source.max_characters, f"data.sources.{name}", source.suffixes)
            for name, source in self.sources.items()
        ]
        self.training_text = BlendedText([self.for_tokenizer(corpus) for corpus in self.corpora], self._weights())

    @property
    def validation_names(self) -> list[str]:
        """The names of the sources, in the order of the validation loaders."""
        return list(self.sources)

    def setup(self, stage: str | None = None) -> None:
        """As in the base class, and log how often a run goes through each source."""
        super().setup(stage)
        if stage == "fit" and self.trainer is not None and self.trainer.max_steps > 0 and self.ranks()[0] == 0:
            samples = self.trainer.max_steps * self.trainer.accumulate_grad_batches * self.batch_size
            message = "data.sources.%s is %.2f %% of the samples; the run goes through it %.2f times."
            for (name, source), passes in zip(self.sources.items(), self.train.passes(samples), strict=True):
                level = logging.WARNING if passes > _MANY_PASSES else logging.INFO
                log.log(level, message, name, 100 * source.weight / sum(self._weights()), passes)

    @cached_property
    def _splits(self) -> list[tuple[Windows, Windows]]:
        opened = []
        for name, corpus in zip(self.sources, self.corpora, strict=True):
            with errors_name(f"data.sources.{name}"):
                opened.append(self.windows(corpus))
        return opened

    @cached_property
    def train(self) -> Blend:
        """The training samples, in order."""
        return Blend([train for train, _ in self._splits], self._weights())

    @property
    def validation(self) -> list[Windows]:
        """The validation samples of each source, in order."""
        return [validation for _, validation in self._splits]

    def val_dataloader(self) -> list[ValidationLoader]:
        """Batches of this rank, each sample once: those of each source, and then those of each validation set."""
        return [*self.predict_dataloader(), *self.extra_loaders()]

    def predict_dataloader(self) -> list[ValidationLoader]:
        """The validation splits of the sources."""
        return [self.evaluation_loader(windows) for windows in self.validation]

    def identity(self) -> dict[str, Any]:
        """The sources in order, their weights and text, and how it is cut and shuffled."""
        identity: dict[str, Any] = {"seed": self.seed, "sources": list(self.sources)}
        identity |= {f"sources.{name}.weight": float(source.weight) for name, source in self.sources.items()}
        identity |= {"sequence_length": self.sequence_length, "packing": self.packing}
        # last, since a tokenizer trained with other weights changes all hashes
        pairs = zip(self.sources, self.train.sources, strict=True)
        return identity | {f"sources.{name}.data_hash": windows.shards.data_hash for name, windows in pairs}

    def what(self, name: str) -> str:
        """The beginning of a message about an entry of the `identity`."""
        source = name.removesuffix(".data_hash")
        return super().what(name) if source == name else f"data.{source} has the data hash"

    def _weights(self) -> list[float]:
        return [source.weight for source in self.sources.values()]
