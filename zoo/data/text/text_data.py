"""Text data, the default class of `data:` in a config."""

from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any

from zoo.data.loader import ValidationLoader
from zoo.data.resumable import check_minimum
from zoo.data.text.bigram import interpolated_bigram_loss
from zoo.data.text.corpus import Corpus
from zoo.data.text.packing import Windows
from zoo.data.text.tokenised_text import TokenisedText

COUNTED = 20_000_000  # tokens of each split used for the bigram model, since corpora may exceed memory


@dataclass(eq=False, repr=False)
class TextData(TokenisedText):
    """Text, tokenised once and cached, that can be resumed at any step with any number of devices.

    The order is a function of the seed and of one integer, the number of samples seen, which checkpoints hold.

    The other arguments are those of `TokenisedText`.

    Args:
        path: A `.txt` or `.md` file (one document), a `.jsonl` or `.parquet` file (one document a row), all but
            `.parquet` also with `.gz`, `.zst` or `.xz`; tokens of Megatron (`.bin` with `.idx`) or datatrove (`.ds`),
            of the tokenizer that `data.tokenizer` names; a folder that is searched for these (other files in
            it are reported, unless hidden), or a list of files and folders. "datasets:NAME[:CONFIG[:SPLIT]]": a data
            set of Hugging Face, streamed. "datasets:FORMAT:FILES": files that its library reads (arrow, csv, json,
            parquet or text), at a path, a pattern or a URL such as `s3://bucket/*.jsonl`. Null: the embedded corpus,
            Python's standard library and documentation.
        text_field: Field or column of JSON and Parquet files with the text; `meta.body` is a field inside a field.
        max_characters: Size of the embedded corpus; null: all of it. Your own files are never cut.
        suffixes: Further suffixes of files in folders that are text, one document each: `[code]` for source code, or
            such as `[.log]`.

    Raises:
        UserError: An argument is out of range, a file cannot be used, or a checkpoint is of other data.
    """

    overfit_hint = "set data.path to a small file"

    path: str | list[str] | None = None
    _: KW_ONLY
    text_field: str = "text"
    max_characters: int | None = 5_000_000
    suffixes: list[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_minimum(max_characters=(self.max_characters, 1))
        self.corpus = Corpus(self.path, self.text_field, self.max_characters, suffixes=self.suffixes)
        self.training_text = self.for_tokenizer(self.corpus)
        self.corpora = [self.corpus]

    @cached_property
    def _splits(self) -> tuple[Windows, Windows]:
        return self.windows(self.corpus)

    @property
    def train(self) -> Windows:
        """The training samples, in order."""
        return self._splits[0]

    @property
    def validation(self) -> Windows:
        """The validation samples, in order."""
        return self._splits[1]

    def bigram_loss(self) -> float:
        """Loss in nats per token of an interpolated bigram model of the training tokens on the validation tokens."""
        splits = (self.train.shards, self.validation.shards)
        train, validation = (shards.read(0, min(len(shards), COUNTED)) for shards in splits)
        return interpolated_bigram_loss(train, validation, self.get_tokenizer().vocab_size)

    def val_dataloader(self) -> ValidationLoader | list[ValidationLoader]:
        """Batches of this rank, each sample once: those of the split, and then those of each validation set."""
        loader = self.predict_dataloader()
        return [loader, *self.extra_loaders()] if self.validation_sets else loader

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
