"""The base class of text data: one tokenizer, documents tokenised once into token shards, windows as samples."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kernels.errors import UserError
from zoo.data.loader import ValidationLoader
from zoo.data.resumable import ResumableData, check_minimum
from zoo.data.text.corpus import Corpus
from zoo.data.text.packing import Packing, Windows
from zoo.data.text.shards import Shards, prepare
from zoo.data.text.tokenizer import Documents, Tokenizer, train_tokenizer


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


class TokenisedText(ResumableData):
    """Windows of one or several corpora that share a tokenizer.

    Args:
        tokenizer: A `tokenizer.json` or a folder with one. Null: byte-level BPE is trained on `training_text`.
        eos_token: The token that ends every document. Null: the first of `END_TOKENS` in the tokenizer.
        bos_token: The token at the start of every document. Null: none.
        vocab_size: Number of tokens of a trained tokenizer, at least 257. Not used with a loaded one.
        sequence_length: Tokens in a sequence.
        batch_size: Sequences in a batch, over all devices; a multiple of the number of devices.
        packing: "windows" or "documents", as in `Windows`.
        validation_fraction: Expected fraction of the documents kept for validation, between 0 and 1.
        validation_sets: Name → text that is validated on as well, whose loss is `val_loss_NAME` and no part of
            `val_loss`.
        num_workers: Worker processes per device that prefetch batches; 0: none.
        preprocessing_workers: Number of processes for tokenising. Null: one per CPU.
        shards: A folder or URL for the token shards. Null: the cache.
        verify: Whether to verify the checksums of all token shards before training. Null: those of less than 1 GB.
        seed: Seed of the order of the training sequences.

    Raises:
        UserError: An argument is out of range.
    """

    def __init__(
        self,
        *,
        tokenizer: str | None,
        eos_token: str | None,
        bos_token: str | None,
        vocab_size: int,
        sequence_length: int,
        batch_size: int,
        packing: Packing,
        validation_fraction: float,
        validation_sets: Mapping[str, ValidationSet] | None,
        num_workers: int,
        preprocessing_workers: int | None,
        shards: str | None,
        verify: bool | None,
        seed: int,
    ) -> None:
        super().__init__(batch_size, num_workers, seed)
        check_minimum(sequence_length=(sequence_length, 1), preprocessing_workers=(preprocessing_workers, 1))
        if not 0 < validation_fraction < 1:
            raise UserError(f"data.validation_fraction is {validation_fraction}; it must lie between 0 and 1.")
        if packing not in ("windows", "documents"):
            raise UserError(f"data.packing is {packing!r}; it must be 'windows' or 'documents'.")
        check_names("validation_sets", validation_sets or {})
        self.validation_sets = dict(validation_sets or {})
        self._validated_beside: list[Windows] = []
        self.vocab_size, self.sequence_length = vocab_size, sequence_length
        self.packing: Packing = packing
        self.validation_fraction, self.preprocessing_workers = validation_fraction, preprocessing_workers
        self.verify, self.shards = verify, shards
        self._tokenizer_path, self._special = tokenizer, (eos_token, bos_token)
        self._tokenizer: Tokenizer | None = None

    @property
    def corpora(self) -> list[Corpus]:
        """The corpora to tokenise."""
        raise NotImplementedError

    @property
    def training_text(self) -> Documents:
        """The documents on which a tokenizer is trained."""
        raise NotImplementedError

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer, loaded or trained at the first call; it does not need `setup`."""
        if self._tokenizer is None:
            if self._tokenizer_path is None:
                self._tokenizer = train_tokenizer(self.training_text, self.vocab_size, *self._special)
            else:
                self._tokenizer = Tokenizer.from_file(self._tokenizer_path, *self._special)
        return self._tokenizer

    def prepare_data(self) -> None:
        """Tokenise all corpora (once per machine)."""
        for corpus in self.corpora:
            corpus.warn_of_skipped()
            self._prepare(corpus, self.validation_fraction)
        for key, corpus in self._corpora_beside():
            corpus.warn_of_skipped()
            with errors_name(key):
                self._prepare(corpus, None)

    @property
    def names_beside(self) -> list[str]:
        """The names of the validation sets, whose loaders come after those of the split."""
        return list(self.validation_sets)

    def loaders_beside(self) -> list[ValidationLoader]:
        """A loader for each validation set: batches of this rank, each sample once."""
        opened = self._validated_beside
        for key, corpus in [*self._corpora_beside()][len(opened) :]:
            with errors_name(key):
                shards = Shards(self._prepare(corpus, None), "validation", self.verify)
                opened.append(Windows(shards, self.sequence_length, self.packing))
        return [self.evaluation_loader(windows) for windows in opened]

    def windows(self, corpus: Corpus) -> tuple[Windows, Windows]:
        """The training and validation samples of a corpus, from verified token shards."""
        folder = self._prepare(corpus, self.validation_fraction)
        train, validation = Shards(folder, "train", self.verify), Shards(folder, "validation", self.verify)
        settings = (self.sequence_length, self.packing)
        return Windows(train, *settings), Windows(validation, *settings)

    def _corpora_beside(self) -> Iterator[tuple[str, Corpus]]:
        for name, text in self.validation_sets.items():
            key = f"data.validation_sets.{name}"
            yield key, Corpus(text.path, text.text_field, text.max_characters, key)

    def _prepare(self, corpus: Corpus, fraction: float | None) -> Path | str:
        return prepare(corpus, self.get_tokenizer(), fraction, self.preprocessing_workers, self.shards)


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
