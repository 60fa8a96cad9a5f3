"""The base class of text data: one tokenizer, documents tokenised once into token shards, windows as samples."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels.errors import Option, UserError
from zoo.arguments import check_not_empty
from zoo.data.loader import ValidationLoader
from zoo.data.resumable import ResumableData, check_minimum
from zoo.data.text.corpus import Corpus
from zoo.data.text.packing import Packing, Windows, check_packing, samples_of
from zoo.data.text.shards import Shards, prepare
from zoo.data.text.split import WithoutTest
from zoo.data.text.tokenizer import Documents, Tokenizer, check_size, train_tokenizer


@dataclass(frozen=True)
class ValidationSet:
    """Text for validation alone, all of it.

    Args:
        path: As `TextData.path`: files, folders or URLs, or text that comes with Python, "embedded:documentation".
        text_field: Field or column of JSON and Parquet files with the text.
        max_characters: Size of embedded or synthetic text; null: all of it.
    """

    path: str | list[str]
    text_field: str = "text"
    max_characters: int | None = 5_000_000


@dataclass(kw_only=True, eq=False, repr=False)
class TokenisedText(ResumableData):
    """Windows of one or several corpora that share a tokenizer; a subclass sets `corpora` and `training_text`.

    Args:
        tokenizer: A `tokenizer.json` or a folder with one. Null: byte-level BPE is trained on the training text.
        eos_token: The token that ends every document. Null: the one recorded in a tokenizer saved by a run or export,
            or else the first that it has of `<eos>`, `</s>`, `<|endoftext|>` and `<|end_of_text|>`.
        bos_token: The token at the start of every document, also when generating text. Null: the one recorded in a
            tokenizer saved by a run or export, or else none.
        vocab_size: Number of tokens of a trained tokenizer, from 257 to 10 million. It may be null with a loaded one,
            which does not use it.
        sequence_length: Tokens in a sequence.
        batch_size: Sequences in a batch, over all devices; a multiple of the number of devices.
        packing: "windows": sequences continue across document boundaries. "documents": each batch is one row, in which
            windows and documents are separate sequences (`cu_seqlens`), with no loss from one to the next.
            "whole_documents": as "documents", but none is cut: rows are padded, and documents longer than
            `sequence_length` are left out with a warning.
        validation_fraction: Expected fraction of the documents (of each source) kept for validation, between 0 and 1.
        test_fraction: Expected fraction of the documents kept for the verb `test`, which neither training (also of a
            tokenizer) nor validation sees; those for validation are the same. Null: none are kept.
        validation_sets: Name → path of text that is validated on as well, such as {wikitext: {path: wiki.txt}}. Its
            loss is `val_loss_wikitext`; `val_loss`, by which checkpoints are chosen, stays that of the split.
        num_workers: Worker processes per device that prefetch batches; 0: none.
        preprocessing_workers: Number of processes for tokenising. Null: one per CPU.
        shards: A folder or URL (`s3://bucket/tokens/`) for the token shards, which all machines may share. From a URL
            they are read in place, one request per window, so prefetch with `num_workers`. Null: this machine's cache.
        verify: Whether to verify the checksums of all token shards before training, at a second per GB. Null: if a
            split has less than 1 GB and is local. Sizes are always compared.
        seed: Seed of the order of the training sequences.

    Raises:
        UserError: An argument is out of range.
    """

    tokenizer: str | None = None
    eos_token: str | None = None
    bos_token: str | None = None
    vocab_size: int | None = 1024
    sequence_length: int = 256
    batch_size: int = 8
    packing: Packing = "windows"
    validation_fraction: float = 0.05
    test_fraction: float | None = None
    validation_sets: dict[str, ValidationSet] | None = None
    num_workers: int = 0
    preprocessing_workers: int | None = None
    shards: str | None = None
    verify: bool | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__init__(self.batch_size, self.num_workers, self.seed)
        for name in ("tokenizer", "shards"):
            check_not_empty(f"data.{name}", getattr(self, name))
        check_minimum(preprocessing_workers=(self.preprocessing_workers, 1))
        check_packing(self.sequence_length, self.packing)
        if not 0 < self.validation_fraction < 1:
            raise UserError(f"data.validation_fraction is {self.validation_fraction}; it must lie between 0 and 1.")
        if self.test_fraction is not None and not 0 < self.test_fraction < 1 - self.validation_fraction:
            raise UserError(
                f"data.test_fraction is {self.test_fraction}; it must be null, or lie between 0 and "
                f"{1 - self.validation_fraction:g}, so that documents for training are left."
            )
        if self.tokenizer is None:
            if self.vocab_size is None:
                raise UserError("data.vocab_size: null needs data.tokenizer; a tokenizer that is trained has a size")
            check_size(self.vocab_size)
        self.validation_sets = dict(self.validation_sets or {})
        check_names("validation_sets", self.validation_sets)
        self.corpora: list[Corpus]  # to tokenise
        self.training_text: Documents  # on which a tokenizer is trained
        self._extra_windows: list[Windows] = []  # of the validation sets
        self._tokenizer: Tokenizer | None = None

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer, loaded or trained at the first call; it does not need `setup`."""
        if self._tokenizer is None:
            special = self.eos_token, self.bos_token
            if self.tokenizer is None:
                assert self.vocab_size is not None
                self._tokenizer = train_tokenizer(self.training_text, self.vocab_size, *special)
            else:
                self._tokenizer = Tokenizer.from_file(self.tokenizer, *special)
        return self._tokenizer

    def check_files(self) -> None:
        """Raise a UserError if files of text are missing or of an unsupported type, and warn of those not read."""
        for corpus in (*self.corpora, *(corpus for _, corpus in self._extra_corpora())):
            corpus.warn_of_skipped()

    def prepare_data(self) -> None:
        """Tokenise all corpora (once per machine)."""
        self.check_files()
        for corpus in self.corpora:
            self._prepare(corpus)
        for key, corpus in self._extra_corpora():
            with errors_name(key):
                self._prepare(corpus, split=False)

    def setup(self, stage: str | None = None) -> None:
        """Open and check the token shards, and start training at the first sample until a checkpoint is loaded.

        Raises:
            UserError: A batch is larger than the training data, and might not even fit into memory.
        """
        super().setup(stage)
        samples = len(self.train)
        if stage == "fit" and self.batch_size > samples:
            raise UserError(f"data.batch_size is {self.batch_size}; the training data has only {samples} samples.")

    @property
    def extra_sets(self) -> list[str]:
        """The names of the validation sets, whose loaders come after those of the split."""
        return list(self.validation_sets or {})

    def extra_loaders(self) -> list[ValidationLoader]:
        """A loader for each validation set: batches of this rank, each sample once."""
        opened = self._extra_windows
        for key, corpus in [*self._extra_corpora()][len(opened) :]:
            with errors_name(key):
                shards = Shards(self._prepare(corpus, split=False), "validation", self.verify)
                opened.append(samples_of(shards, self.sequence_length, self.packing))
        return [self.evaluation_loader(windows) for windows in opened]

    def windows(self, corpus: Corpus) -> tuple[Windows, Windows]:
        """The training and validation samples of a corpus, from verified token shards."""
        folder = self._prepare(corpus)
        train, validation = Shards(folder, "train", self.verify), Shards(folder, "validation", self.verify)
        settings = (self.sequence_length, self.packing)
        return samples_of(train, *settings), samples_of(validation, *settings)

    def test_dataloader(self) -> list[ValidationLoader]:
        """Batches of this rank, each sample once: those of the test split of each corpus.

        Raises:
            UserError: `test_fraction` is null.
        """
        if self.test_fraction is None:
            raise UserError(
                "data.test_fraction is null, so the text has no documents that were kept for a test; train with ",
                Option("data.test_fraction", "0.05"),
                ", or measure the loss on the validation split by `validate`",
            )
        shards = [Shards(self._prepare(corpus), "test", self.verify) for corpus in self.corpora]
        return [self.evaluation_loader(samples_of(each, self.sequence_length, self.packing)) for each in shards]

    def for_tokenizer(self, corpus: Corpus) -> Documents:
        """The documents of a corpus on which a tokenizer may be trained."""
        return (
            corpus if self.test_fraction is None else WithoutTest(corpus, self.validation_fraction, self.test_fraction)
        )

    def state_dict(self) -> dict[str, Any]:
        """As in the base class, and the fraction of documents that were kept for a test."""
        kept = {} if self.test_fraction is None else {"test_fraction": self.test_fraction}
        return super().state_dict() | kept

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in the base class; a UserError if documents for the test would not be those of the run."""
        before, now = (value or "null" for value in (state_dict.get("test_fraction"), self.test_fraction))
        if before != now and self.trainer is not None and self.trainer.state.fn in ("fit", "test"):
            raise UserError(
                f"data.test_fraction is {now}, but the checkpoint was trained with {before}: its test documents would "
                "not be those that the run has never seen; use that, or start a new run."
            )
        super().load_state_dict(state_dict)

    def _extra_corpora(self) -> Iterator[tuple[str, Corpus]]:
        for name, text in (self.validation_sets or {}).items():
            key = f"data.validation_sets.{name}"
            yield key, Corpus(text.path, text.text_field, text.max_characters, key)

    def _prepare(self, corpus: Corpus, split: bool = True) -> Path | str:
        fraction, test_fraction = (self.validation_fraction, self.test_fraction) if split else (None, None)
        settings = (fraction, self.preprocessing_workers, self.shards)
        return prepare(corpus, self.get_tokenizer(), *settings, test_fraction=test_fraction)


@contextmanager
def errors_name(key: str) -> Iterator[None]:
    """Prefix a UserError with the config key of the text it is about."""
    try:
        yield
    except UserError as error:
        raise error if str(error).startswith(key) else UserError(f"{key}: {error}") from None


def check_names(key: str, names: Iterable[str]) -> None:
    """Raise a UserError for the first name of a text that cannot be a part of a metric's name."""
    for name in names:
        if not re.fullmatch(r"[\w-]+", name):
            raise UserError(f"data.{key}: the name {name!r} may have letters, digits, '_' and '-' only.")
