"""What data of text has in common: one tokenizer, documents tokenised once into shards, windows of them as samples."""

from pathlib import Path

from kernels.errors import UserError
from zoo.data.resumable import ResumableData, check_least
from zoo.data.text.corpus import Corpus
from zoo.data.text.packing import Packing, Windows
from zoo.data.text.shards import Shards, prepare
from zoo.data.text.tokenizer import Documents, Tokenizer, train_tokenizer


class TokenisedText(ResumableData):
    """Windows of one or several corpora that share a tokenizer.

    Args:
        tokenizer: A `tokenizer.json` or a folder with one. Null: byte-level BPE is trained on `training_text`.
        eos_token: The tokenizer's token that ends every document. Null: the first of `END_TOKENS` that it has.
        bos_token: The tokenizer's token that is put before every document. Null: none.
        vocab_size: Number of tokens of a trained tokenizer, at least 257. Not used with a loaded one.
        sequence_length: Tokens in a sequence.
        batch_size: Sequences in a batch over all devices together; a multiple of the number of devices.
        packing: "windows" or "documents", as in `Windows`.
        validation_fraction: Expected share of the documents that is kept for validation, between 0 and 1.
        num_workers: Processes that read batches ahead, on each device; 0: none.
        preprocessing_workers: Processes that tokenise. Null: one per CPU.
        shards: A folder or URL for the tokens. Null: the cache.
        verify: Whether all shards are compared with their checksums before training. Null: those of less than 1 GB.
        seed: Of the order of the training sequences.

    Raises:
        UserError: an argument cannot be used.
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
        num_workers: int,
        preprocessing_workers: int | None,
        shards: str | None,
        verify: bool | None,
        seed: int,
    ) -> None:
        super().__init__(batch_size, num_workers, seed)
        check_least(sequence_length=(sequence_length, 1), preprocessing_workers=(preprocessing_workers, 1))
        if not 0 < validation_fraction < 1:
            raise UserError(f"data.validation_fraction is {validation_fraction}; it must lie between 0 and 1.")
        if packing not in ("windows", "documents"):
            raise UserError(f"data.packing is {packing!r}; it must be 'windows' or 'documents'.")
        self.vocab_size, self.sequence_length = vocab_size, sequence_length
        self.packing: Packing = packing
        self.validation_fraction, self.preprocessing_workers = validation_fraction, preprocessing_workers
        self.verify, self.shards = verify, shards
        self._tokenizer_path, self._special = tokenizer, (eos_token, bos_token)
        self._tokenizer: Tokenizer | None = None

    @property
    def corpora(self) -> list[Corpus]:
        """What is tokenised."""
        raise NotImplementedError

    @property
    def training_text(self) -> Documents:
        """What a tokenizer is trained on."""
        raise NotImplementedError

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer, loaded or trained at the first call; needs no `setup`."""
        if self._tokenizer is None:
            if self._tokenizer_path is None:
                self._tokenizer = train_tokenizer(self.training_text, self.vocab_size, *self._special)
            else:
                self._tokenizer = Tokenizer.from_file(self._tokenizer_path, *self._special)
        return self._tokenizer

    def prepare_data(self) -> None:
        """Tokenise into the cache (once per machine)."""
        for corpus in self.corpora:
            corpus.warn_of_skipped()
            self._prepare(corpus)

    def windows(self, corpus: Corpus) -> tuple[Windows, Windows]:
        """A corpus's training and validation samples, out of shards that were checked."""
        folder = self._prepare(corpus)
        train, validation = Shards(folder, "train", self.verify), Shards(folder, "validation", self.verify)
        cut = (self.sequence_length, self.packing)
        return Windows(train, *cut), Windows(validation, *cut)

    def _prepare(self, corpus: Corpus) -> Path | str:
        tokenizer, fraction = self.get_tokenizer(), self.validation_fraction
        return prepare(corpus, tokenizer, fraction, self.preprocessing_workers, self.shards)
