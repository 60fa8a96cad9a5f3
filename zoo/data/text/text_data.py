"""Text as the data of a run: what `data:` means in a config unless it names another class."""

from typing import Any

from zoo.data.loader import ValidationLoader
from zoo.data.resumable import check_least
from zoo.data.text.bigram import interpolated_bigram_loss
from zoo.data.text.corpus import Corpus
from zoo.data.text.packing import Packing, Windows
from zoo.data.text.tokenised_text import TokenisedText

COUNTED = 20_000_000  # tokens of a split that the bigram model sees: corpora may be larger than memory


class TextData(TokenisedText):
    """Text, tokenised once and cached, as batches that can be resumed at any step with any number of devices.

    The order is a function of the seed and of one integer, the number of samples seen; checkpoints hold that integer.

    Args:
        path: A `.txt` or `.md` file (one document), a `.jsonl` or `.parquet` file (one document a row), a `.json` file
            (JSON lines, an array of objects or strings, or one object), all but `.parquet` also with `.gz`, `.zst`,
            `.bz2` or `.xz`; a folder that is searched for these (what else is in it is told, unless it is hidden), or
            a list of all of that; each a path or a URL that fsspec knows, such as `s3://bucket/texts/`. Null: the
            embedded corpus, Python's own library and documentation.
        tokenizer: A `tokenizer.json` or a folder with one. Null: byte-level BPE is trained on the corpus.
        eos_token: The tokenizer's token that ends every document. Null: what a run or export says with which it was
            saved, else the first that it has of `<eos>`, `</s>`, `<|endoftext|>` and `<|end_of_text|>`.
        bos_token: The tokenizer's token that is put before every document, also when text is generated. Null: what a
            run or export says, else none.
        vocab_size: Number of tokens of a trained tokenizer, at least 257. Not used with a loaded one.
        sequence_length: Tokens in a sequence.
        batch_size: Sequences in a batch over all devices together; a multiple of the number of devices.
        packing: "windows": sequences go on over the ends of documents. "documents": each batch is one row, in which
            windows and documents are separate sequences (`cu_seqlens`), without loss from one to the next.
        validation_fraction: Expected share of the documents that is kept for validation, between 0 and 1.
        text_field: Field or column of JSON and Parquet files that holds the text.
        max_characters: Where the embedded corpus ends; null: all of it. Files of your own are never cut.
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

    overfit_hint = "set data.path to a small file"

    def __init__(
        self,
        path: str | list[str] | None = None,
        tokenizer: str | None = None,
        eos_token: str | None = None,
        bos_token: str | None = None,
        vocab_size: int = 1024,
        sequence_length: int = 256,
        batch_size: int = 8,
        packing: Packing = "windows",
        validation_fraction: float = 0.05,
        text_field: str = "text",
        max_characters: int | None = 5_000_000,
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
        check_least(max_characters=(max_characters, 1))
        self.corpus = Corpus(path, text_field, max_characters)
        self._train: Windows | None = None
        self._validation: Windows | None = None

    @property
    def corpora(self) -> list[Corpus]:
        """The corpus alone."""
        return [self.corpus]

    @property
    def training_text(self) -> Corpus:
        """The corpus."""
        return self.corpus

    def setup(self, stage: str | None = None) -> None:
        """Open and check the shards; training starts at the first sample unless a checkpoint says otherwise."""
        super().setup(stage)
        if self._validation is not None:
            return
        self._train, self._validation = self.windows(self.corpus)

    @property
    def train(self) -> Windows:
        """The training samples, in order."""
        if self._train is None:
            self.setup()
        assert self._train is not None
        return self._train

    @property
    def validation(self) -> Windows:
        """The validation samples, in order."""
        if self._validation is None:
            self.setup()
        assert self._validation is not None
        return self._validation

    def bigram_loss(self) -> float:
        """Nats per token of an interpolated bigram model of the (first) training tokens on the validation tokens."""
        splits = (self.train.shards, self.validation.shards)
        train, validation = (shards.read(0, min(len(shards), COUNTED)) for shards in splits)
        return interpolated_bigram_loss(train, validation, self.get_tokenizer().vocab_size)

    def val_dataloader(self) -> ValidationLoader:
        """Batches of this rank, each sample once."""
        return self.evaluation_loader(self.validation)

    def test_dataloader(self) -> ValidationLoader:
        """The validation split."""
        return self.val_dataloader()

    def predict_dataloader(self) -> ValidationLoader:
        """The validation split."""
        return self.val_dataloader()

    def identity(self) -> dict[str, Any]:
        """The text, and how it is cut and shuffled."""
        own = {"seed": self.seed, "data_hash": self.train.shards.data_hash}
        return own | {"sequence_length": self.sequence_length, "packing": self.packing}

    def what(self, name: str) -> str:
        """How a message calls a part of the `identity`."""
        return f"{self.corpus} has the data hash" if name == "data_hash" else super().what(name)
