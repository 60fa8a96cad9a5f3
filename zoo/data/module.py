"""The data of a run: what `data:` means in a config."""

import logging
from pathlib import Path
from typing import Any

import lightning as L
import torch.distributed

from kernels.errors import UserError
from zoo.data.bigram import interpolated_bigram_loss
from zoo.data.corpus import Corpus
from zoo.data.loader import TrainLoader, ValidationLoader
from zoo.data.packing import Packing, Windows
from zoo.data.shards import Shards, prepare
from zoo.data.tokenizer import Tokenizer, train_tokenizer

log = logging.getLogger(__name__)


class TextData(L.LightningDataModule):
    """Text, tokenised once and cached, as batches that can be resumed at any step with any number of devices.

    The order is a function of the seed and of one integer, the number of samples seen; checkpoints hold that integer.

    Args:
        path: A `.txt` (one document), `.jsonl` or `.parquet` file (one document a row), a folder that is searched
            for these, or a list of all of that. Null: the embedded corpus, Python's own library and documentation.
        tokenizer: A `tokenizer.json` or a folder with one. Null: byte-level BPE is trained on the corpus.
        vocab_size: Number of tokens of a trained tokenizer, at least 257. Not used with a loaded one.
        sequence_length: Tokens in a sequence.
        batch_size: Sequences in a batch over all devices together; a multiple of the number of devices.
        packing: "windows": sequences go on over the ends of documents. "documents": each batch is one row, in which
            windows and documents are separate sequences (`cu_seqlens`), without loss from one to the next.
        validation_fraction: Expected share of the documents that is kept for validation, between 0 and 1.
        text_field: Field or column of `.jsonl` and `.parquet` files that holds the text.
        max_characters: Where the embedded corpus ends; null: all of it. Files of your own are never cut.
        num_workers: Processes that read batches ahead, on each device; 0: none.
        preprocessing_workers: Processes that tokenise. Null: one per CPU.
        seed: Of the order of the training sequences.

    Raises:
        UserError: an argument or a file cannot be used, or a checkpoint is of other data.
    """

    def __init__(
        self,
        path: str | list[str] | None = None,
        tokenizer: str | None = None,
        vocab_size: int = 1024,
        sequence_length: int = 256,
        batch_size: int = 8,
        packing: Packing = "windows",
        validation_fraction: float = 0.05,
        text_field: str = "text",
        max_characters: int | None = 5_000_000,
        num_workers: int = 0,
        preprocessing_workers: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        at_least: dict[str, tuple[int | None, int]] = {
            "sequence_length": (sequence_length, 1),
            "batch_size": (batch_size, 1),
        }
        at_least |= {"num_workers": (num_workers, 0), "preprocessing_workers": (preprocessing_workers, 1)}
        at_least |= {"max_characters": (max_characters, 1)}
        for name, (value, least) in at_least.items():
            if value is not None and value < least:
                raise UserError(f"data.{name} is {value}; it must be at least {least}.")
        if not 0 < validation_fraction < 1:
            raise UserError(f"data.validation_fraction is {validation_fraction}; it must lie between 0 and 1.")
        if packing not in ("windows", "documents"):
            raise UserError(f"data.packing is {packing!r}; it must be 'windows' or 'documents'.")
        self.corpus = Corpus(path, text_field, max_characters)
        self.vocab_size, self.sequence_length, self.batch_size = vocab_size, sequence_length, batch_size
        self.packing: Packing = packing
        self.validation_fraction, self.seed = validation_fraction, seed
        self.num_workers, self.preprocessing_workers = num_workers, preprocessing_workers
        self._tokenizer_path = tokenizer
        self._tokenizer: Tokenizer | None = None
        self._train: Windows | None = None
        self._validation: Windows | None = None
        self._train_loader: TrainLoader | None = None
        self._position = 0  # where the next training loader starts

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer, loaded or trained at the first call; needs no `setup`."""
        if self._tokenizer is None:
            if self._tokenizer_path is None:
                self._tokenizer = train_tokenizer(self.corpus, self.vocab_size)
            else:
                self._tokenizer = Tokenizer.from_file(self._tokenizer_path)
        return self._tokenizer

    def prepare_data(self) -> None:
        """Tokenise into the cache (once per machine)."""
        self._prepare()

    def _prepare(self) -> Path:
        return prepare(self.corpus, self.get_tokenizer(), self.validation_fraction, self.preprocessing_workers)

    def setup(self, stage: str | None = None) -> None:
        """Open and check the shards; training starts at the first sample unless a checkpoint says otherwise."""
        self._position, self._train_loader = 0, None
        if self._validation is not None:
            return
        folder = self._prepare()
        train, validation = Shards(folder, "train"), Shards(folder, "validation")
        self._train = Windows(train, self.sequence_length, self.packing)
        self._validation = Windows(validation, self.sequence_length, self.packing)

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
        """Nats per token of an interpolated bigram model of the training tokens on the validation tokens."""
        train, validation = self.train.shards, self.validation.shards
        return interpolated_bigram_loss(
            train.read(0, len(train)), validation.read(0, len(validation)), self.get_tokenizer().vocab_size
        )

    def train_dataloader(self) -> TrainLoader:
        """Batches of this rank, shuffled and endless."""
        if self.trainer is not None and self.trainer.overfit_batches:
            raise UserError(
                f"trainer.overfit_batches is {self.trainer.overfit_batches}, but the training data is an endless "
                "stream; to overfit, set data.path to a small file."
            )
        rank, world_size = self._rank_and_world_size()
        loader = TrainLoader(self.train, self.batch_size, rank, world_size, self.seed, self.num_workers)
        loader.position = self._position
        self._train_loader = loader
        return loader

    def val_dataloader(self) -> ValidationLoader:
        """Batches of this rank, each sample once."""
        rank, world_size = self._rank_and_world_size()
        return ValidationLoader(self.validation, self.batch_size, rank, world_size, self.num_workers)

    def test_dataloader(self) -> ValidationLoader:
        """The validation split."""
        return self.val_dataloader()

    def predict_dataloader(self) -> ValidationLoader:
        """The validation split."""
        return self.val_dataloader()

    def _rank_and_world_size(self) -> tuple[int, int]:
        if self.trainer is not None:
            rank, world_size = self.trainer.global_rank, self.trainer.world_size
        elif torch.distributed.is_available() and torch.distributed.is_initialized():
            rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        else:
            rank, world_size = 0, 1
        if self.batch_size % world_size:
            raise UserError(
                f"data.batch_size is {self.batch_size}; it counts the sequences of all devices together, "
                f"so it must be a multiple of their number, {world_size}."
            )
        return rank, world_size

    def state_dict(self) -> dict[str, Any]:
        """The number of samples that were trained on, and what makes that number mean the same samples again."""
        return {
            "position": self._trained_samples(),
            "seed": self.seed,
            "data_hash": self.train.shards.data_hash,
            "sequence_length": self.sequence_length,
            "packing": self.packing,
            "batch_size": self.batch_size,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the checkpoint's last sample.

        The number of devices and workers may change. `batch_size` may change too, as the position counts samples:
        none is repeated or skipped; the steps are then others, so a warning is logged.

        Raises:
            UserError: another seed, data, sequence length or packing, with both values.
        """
        if self.trainer is not None and self.trainer.state.fn != "fit":
            return  # to evaluate a model on other data is no mistake
        state, own = state_dict, self.state_dict()
        for name in ("seed", "data_hash", "sequence_length", "packing"):
            if state[name] != own[name]:
                what = f"{self.corpus} has the data hash" if name == "data_hash" else f"data.{name} is"
                raise UserError(
                    f"{what} {own[name]}, but the checkpoint was trained with {state[name]}; "
                    "resume with the checkpoint's data settings, or start a new run."
                )
        if state["batch_size"] != self.batch_size:
            log.warning(
                "Resuming with data.batch_size=%d; the checkpoint had %d.", self.batch_size, state["batch_size"]
            )
        self._position = state["position"]
        if self._train_loader is not None:  # Lightning may ask for the loader before it restores
            self._train_loader.position = self._position

    def _trained_samples(self) -> int:
        if self._train_loader is None:
            return self._position
        position = self._train_loader.position
        if self.trainer is not None and self.trainer.state.fn == "fit":
            # A checkpoint written in the middle of a step (on an exception, on Ctrl-C) has one batch not yet used.
            batches = self.trainer.fit_loop.epoch_loop.batch_progress.current
            position -= self.batch_size * (batches.ready - batches.processed)
        return position

    def teardown(self, stage: str | None = None) -> None:
        """Stop reading ahead; the position stays."""
        if self._train_loader is not None:
            self._train_loader.position = self._train_loader.position
