"""Text from several sources, mixed by weight, as the data of a run."""

import logging
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kernels.errors import UserError
from zoo.data.loader import ValidationLoader
from zoo.data.resumable import check_least
from zoo.data.text.blend import Blend, BlendedText
from zoo.data.text.corpus import Corpus
from zoo.data.text.packing import Packing, Windows
from zoo.data.text.tokenised_text import TokenisedText

log = logging.getLogger(__name__)

_MANY_PASSES = 4  # more of the same text teaches less and less (arXiv 2305.16264)


@dataclass(frozen=True)
class Source:
    """One source of a mixture.

    Args:
        path: As `TextData.path`: files, folders or URLs. Null: the embedded corpus, of which "embedded:library" and
            "embedded:documentation" are parts.
        weight: Its share of the training samples, in proportion to the other weights.
        text_field: Field or column of JSON and Parquet files that holds the text.
        max_characters: Where the embedded corpus or a part of it ends; null: all of it.
    """

    path: str | list[str] | None = None
    weight: float = 1.0
    text_field: str = "text"
    max_characters: int | None = 5_000_000


class MixedText(TokenisedText):
    """Text from several sources, mixed by weight, that can be resumed at any step with any number of devices.

    The share of a source in any long stretch of the training samples is its weight's, whatever its size: a small one
    comes round more often, shuffled anew for each pass. Which sample of which source comes when is a function of the
    seed and of one integer, the number of samples seen; checkpoints hold that integer. Each source is validated on its
    own, and all of them together.

    Args:
        sources: Name → path and weight. The names stand in the names of the metrics.
        tokenizer: A `tokenizer.json` or a folder with one. Null: byte-level BPE is trained on the sources' text, mixed
            by weight.
        eos_token: The tokenizer's token that ends every document. Null: what a run or export says with which it was
            saved, else the first that it has of `<eos>`, `</s>`, `<|endoftext|>` and `<|end_of_text|>`.
        bos_token: The tokenizer's token that is put before every document, also when text is generated. Null: what a
            run or export says, else none.
        vocab_size: Number of tokens of a trained tokenizer, at least 257. Not used with a loaded one.
        sequence_length: Tokens in a sequence.
        batch_size: Sequences in a batch over all devices together; a multiple of the number of devices.
        packing: "windows": sequences go on over the ends of documents. "documents": each batch is one row, in which
            windows and documents are separate sequences (`cu_seqlens`), without loss from one to the next.
        validation_fraction: Expected share of each source's documents that is kept for validation, between 0 and 1.
        num_workers: Processes that read batches ahead, on each device; 0: none.
        preprocessing_workers: Processes that tokenise. Null: one per CPU.
        shards: A folder or URL (`s3://bucket/tokens/`) for the tokens, which all machines may share. Behind a URL they
            are read in place, a request for each window: let `num_workers` read ahead. Null: the cache of this machine.
        verify: Whether all shards are compared with their checksums before training, a second for each GB. Null: if a
            split has less than 1 GB and is not behind a URL. Sizes are always compared.
        seed: Of the order of the training sequences.

    Raises:
        UserError: an argument or a file cannot be used, or a checkpoint is of other data.
    """

    overfit_hint = "set data.sources to small files"

    def __init__(
        self,
        sources: dict[str, Source],
        tokenizer: str | None = None,
        eos_token: str | None = None,
        bos_token: str | None = None,
        vocab_size: int = 1024,
        sequence_length: int = 256,
        batch_size: int = 8,
        packing: Packing = "windows",
        validation_fraction: float = 0.05,
        num_workers: int = 0,
        preprocessing_workers: int | None = None,
        shards: str | None = None,
        verify: bool | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(
            tokenizer=tokenizer,
            eos_token=eos_token,
            bos_token=bos_token,
            vocab_size=vocab_size,
            sequence_length=sequence_length,
            batch_size=batch_size,
            packing=packing,
            validation_fraction=validation_fraction,
            num_workers=num_workers,
            preprocessing_workers=preprocessing_workers,
            shards=shards,
            verify=verify,
            seed=seed,
        )
        _check_sources(sources)
        self.sources = dict(sources)
        self._train: Blend | None = None
        self._validation: list[Windows] = []

    @property
    def corpora(self) -> list[Corpus]:
        """One for each source."""
        return [
            Corpus(source.path, source.text_field, source.max_characters, f"data.sources.{name}")
            for name, source in self.sources.items()
        ]

    @property
    def training_text(self) -> BlendedText:
        """All sources, mixed by weight."""
        return BlendedText(self.corpora, self._weights())

    @property
    def validation_names(self) -> list[str]:
        """The names of the sources, in the order of the validation loaders."""
        return list(self.sources)

    def setup(self, stage: str | None = None) -> None:
        """Open and check the shards; training starts at the first sample unless a checkpoint says otherwise."""
        super().setup(stage)
        if self._train is None:
            opened = []
            for name, corpus in zip(self.sources, self.corpora, strict=True):
                with _about(name):
                    opened.append(self.windows(corpus))
            self._train = Blend([train for train, _ in opened], self._weights())
            self._validation = [validation for _, validation in opened]
        if stage == "fit" and self.trainer is not None and self.trainer.max_steps > 0 and self.ranks()[0] == 0:
            self._log_passes(self.trainer.max_steps * self.trainer.accumulate_grad_batches * self.batch_size)

    @property
    def train(self) -> Blend:
        """The training samples, in order."""
        if self._train is None:
            self.setup()
        assert self._train is not None
        return self._train

    @property
    def validation(self) -> list[Windows]:
        """The validation samples of each source, in order."""
        if not self._validation:
            self.setup()
        return self._validation

    def val_dataloader(self) -> list[ValidationLoader]:
        """A loader for each source: batches of this rank, each sample once."""
        return [self.evaluation_loader(each) for each in self.validation]

    def test_dataloader(self) -> list[ValidationLoader]:
        """The validation splits."""
        return self.val_dataloader()

    def predict_dataloader(self) -> list[ValidationLoader]:
        """The validation splits."""
        return self.val_dataloader()

    def identity(self) -> dict[str, Any]:
        """The sources in their order, their weights and text, and how it is cut and shuffled."""
        own: dict[str, Any] = {"seed": self.seed, "sources": list(self.sources)}
        own |= {f"sources.{name}.weight": float(source.weight) for name, source in self.sources.items()}
        own |= {"sequence_length": self.sequence_length, "packing": self.packing}
        # Last: a tokenizer that was trained with other weights gives other hashes.
        pairs = zip(self.sources, self.train.sources, strict=True)
        return own | {f"sources.{name}.data_hash": windows.shards.data_hash for name, windows in pairs}

    def what(self, name: str) -> str:
        """How a message calls a part of the `identity`."""
        source = name.removesuffix(".data_hash")
        return super().what(name) if source == name else f"data.{source} has the data hash"

    def _weights(self) -> list[float]:
        return [source.weight for source in self.sources.values()]

    def _log_passes(self, samples: int) -> None:
        total = sum(self._weights())
        for (name, source), passes in zip(self.sources.items(), self.train.passes(samples), strict=True):
            log.log(
                logging.WARNING if passes > _MANY_PASSES else logging.INFO,
                "data.sources.%s is %.2f %% of the samples; the run goes through it %.2f times.",
                name,
                100 * source.weight / total,
                passes,
            )


@contextmanager
def _about(name: str) -> Iterator[None]:
    """Say of which source an error is."""
    try:
        yield
    except UserError as error:
        key = f"data.sources.{name}"
        raise error if str(error).startswith(key) else UserError(f"{key}: {error}") from None


def _check_sources(sources: Mapping[str, Source]) -> None:
    if not sources:
        raise UserError("data.sources is empty; give at least one, such as {books: {path: books/, weight: 2}}.")
    for name, source in sources.items():
        if not re.fullmatch(r"[\w-]+", name):
            raise UserError(f"data.sources: the name {name!r} may have letters, digits, '_' and '-' only.")
        if not 0 < source.weight < math.inf:
            raise UserError(f"data.sources.{name}.weight is {source.weight}; it must be above 0, and finite.")
        check_least(**{f"sources.{name}.max_characters": (source.max_characters, 1)})
