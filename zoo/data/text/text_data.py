"""Text data, the default class of `data:` in a config."""

from typing import Any

from zoo.data.loader import ValidationLoader
from zoo.data.resumable import check_minimum
from zoo.data.text.bigram import interpolated_bigram_loss
from zoo.data.text.corpus import Corpus
from zoo.data.text.packing import Packing, Windows
from zoo.data.text.tokenised_text import TokenisedText, ValidationSet

COUNTED = 20_000_000  # tokens of each split used for the bigram model, since corpora may exceed memory


class TextData(TokenisedText):
    """Text, tokenised once and cached, that can be resumed at any step with any number of devices.

    The order is a function of the seed and of one integer, the number of samples seen, which checkpoints hold.

    Args:
        path: A `.txt` or `.md` file (one document), a `.jsonl` or `.parquet` file (one document a row), a `.json` file
            (JSON lines, an array of objects or strings, or one object), all but `.parquet` also with `.gz`, `.zst`,
            `.bz2` or `.xz`; a folder that is searched for these (other files in it are reported, unless hidden), or a
            list of files and folders; each a path or a URL that fsspec knows, such as `s3://bucket/texts/`. Null: the
            embedded corpus, Python's standard library and documentation.
        tokenizer: A `tokenizer.json` or a folder with one. Null: byte-level BPE is trained on the corpus.
        eos_token: The token that ends every document. Null: the one recorded in a tokenizer saved by a run or export,
            or else the first that it has of `<eos>`, `</s>`, `<|endoftext|>` and `<|end_of_text|>`.
        bos_token: The token at the start of every document, also when generating text. Null: the one recorded in a
            tokenizer saved by a run or export, or else none.
        vocab_size: Number of tokens of a trained tokenizer, at least 257. Not used with a loaded one.
        sequence_length: Tokens in a sequence.
        batch_size: Sequences in a batch, over all devices; a multiple of the number of devices.
        packing: "windows": sequences continue across document boundaries. "documents": each batch is one row, in which
            windows and documents are separate sequences (`cu_seqlens`), with no loss from one to the next.
        validation_fraction: Expected fraction of the documents kept for validation, between 0 and 1.
        validation_sets: Name → path of text that is validated on as well, such as {wikitext: {path: wiki.txt}}. Its
            loss is `val_loss_wikitext`; `val_loss`, by which checkpoints are chosen, stays that of the split.
        text_field: Field or column of JSON and Parquet files with the text.
        max_characters: Size of the embedded corpus; null: all of it. Your own files are never cut.
        num_workers: Worker processes per device that prefetch batches; 0: none.
        preprocessing_workers: Number of processes for tokenising. Null: one per CPU.
        shards: A folder or URL (`s3://bucket/tokens/`) for the token shards, which all machines may share. From a URL
            they are read in place, one request per window, so prefetch with `num_workers`. Null: this machine's cache.
        verify: Whether to verify the checksums of all token shards before training, at a second per GB. Null: if a
            split has less than 1 GB and is local. Sizes are always compared.
        seed: Seed of the order of the training sequences.

    Raises:
        UserError: An argument is out of range, a file cannot be used, or a checkpoint is of other data.
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
        validation_sets: dict[str, ValidationSet] | None = None,
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
            validation_sets=validation_sets,
            num_workers=num_workers,
            preprocessing_workers=preprocessing_workers,
            shards=shards,
            verify=verify,
            seed=seed,
        )
        check_minimum(max_characters=(max_characters, 1))
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
        """Open and check the token shards, and start training at the first sample until a checkpoint is loaded."""
        super().setup(stage)
        if self._validation is None:
            self._train, self._validation = self.windows(self.corpus)
        if stage == "fit":
            self.check_batch_size(len(self.train))

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
        """Loss in nats per token of an interpolated bigram model of the training tokens on the validation tokens."""
        splits = (self.train.shards, self.validation.shards)
        train, validation = (shards.read(0, min(len(shards), COUNTED)) for shards in splits)
        return interpolated_bigram_loss(train, validation, self.get_tokenizer().vocab_size)

    def val_dataloader(self) -> ValidationLoader | list[ValidationLoader]:
        """Batches of this rank, each sample once: those of the split, and then those of each validation set."""
        loader = self.predict_dataloader()
        return [loader, *self.loaders_beside()] if self.validation_sets else loader

    def test_dataloader(self) -> ValidationLoader | list[ValidationLoader]:
        """Return the validation batches, which `test` uses as well."""
        return self.val_dataloader()

    def predict_dataloader(self) -> ValidationLoader:
        """The validation split."""
        return self.evaluation_loader(self.validation)

    def identity(self) -> dict[str, Any]:
        """The text, and how it is cut and shuffled."""
        data = {"seed": self.seed, "data_hash": self.train.shards.data_hash}
        return data | {"sequence_length": self.sequence_length, "packing": self.packing}

    def what(self, name: str) -> str:
        """The beginning of a message about an entry of the `identity`."""
        return f"{self.corpus} has the data hash" if name == "data_hash" else super().what(name)
