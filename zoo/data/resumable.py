"""The base class of data modules, whose position in training is one integer."""

import logging
import weakref
from typing import Any

import lightning as L
import torch.distributed

from kernels.errors import UserError
from zoo.data.gradient_accumulation import unfinished_batches
from zoo.data.loader import OrderedSamples, SampleSet, TrainLoader, ValidationLoader

log = logging.getLogger(__name__)

MOST_WORKERS = 1024  # a typo must not start processes without end


class ResumableData(L.LightningDataModule):
    """Data that can be resumed at any step with any number of devices.

    The order is a function of the seed and of one integer, the number of samples seen. Checkpoints hold that integer,
    and the `identity` that defines its meaning.

    Args:
        batch_size: Sequences in a batch, over all devices; a multiple of the number of devices.
        num_workers: Worker processes per device that prefetch batches; 0: none.
        seed: Seed of the order of the training sequences.

    Raises:
        UserError: An argument is out of range, or a checkpoint is of other data.
    """

    overfit_hint: str  # how to train on little data

    def __init__(self, batch_size: int, num_workers: int, seed: int) -> None:
        super().__init__()
        check_minimum(batch_size=(batch_size, 1), num_workers=(num_workers, 0))
        if num_workers > MOST_WORKERS:
            raise UserError(f"num_workers: {num_workers:,} processes per device; at most {MOST_WORKERS:,} are started")
        self.batch_size, self.num_workers, self.seed = batch_size, num_workers, seed
        self._train_loader: TrainLoader | None = None
        self._position = 0  # where the next training loader starts
        self._evaluating: weakref.WeakSet[ValidationLoader] = weakref.WeakSet()

    @property
    def train(self) -> OrderedSamples:
        """The training samples, in order."""
        raise NotImplementedError

    def get_tokenizer(self) -> Any:
        """The tokenizer; None for samples that are not text."""
        return None

    def identity(self) -> dict[str, Any]:
        """Argument → value, as plain containers: all that determines which sample is at a position."""
        raise NotImplementedError

    def what(self, name: str) -> str:
        """The beginning of a message about an entry of the `identity`."""
        return f"data.{name} is"

    def setup(self, stage: str | None = None) -> None:
        """Start training at the first sample, until a checkpoint is loaded."""
        self._position, self._train_loader = 0, None

    def train_dataloader(self) -> TrainLoader:
        """Batches of this rank, shuffled and endless."""
        if self.trainer is not None and self.trainer.overfit_batches:
            raise UserError(
                f"trainer.overfit_batches is {self.trainer.overfit_batches}, but the training data is an endless "
                f"stream; to overfit, {self.overfit_hint}."
            )
        per_step = 1 if self.trainer is None else self.trainer.accumulate_grad_batches
        loader = TrainLoader(self.train, self.batch_size, *self.ranks(), self.seed, self.num_workers, per_step)
        loader.position = self._position
        self._train_loader = loader
        return loader

    def val_dataloader(self) -> Any:
        """Batches of this rank for validation: a loader of `evaluation_loader`, or a list of them."""
        raise NotImplementedError

    def test_dataloader(self) -> Any:
        """As for validation, for `test`; by default of the same samples."""
        return self.val_dataloader()

    def predict_dataloader(self) -> Any:
        """As for validation, for `predict`; by default of the same samples."""
        return self.val_dataloader()

    def evaluation_loader(self, samples: SampleSet) -> ValidationLoader:
        """Batches of this rank, each sample once."""
        loader = ValidationLoader(samples, self.batch_size, *self.ranks(), self.num_workers)
        self._evaluating.add(loader)
        return loader

    def ranks(self) -> tuple[int, int]:
        """The share of this process, and the number of shares, by which the batch size must be divisible.

        Each process has a separate share, unless neighbours share sequences (`context_parallel`).
        """
        sharing = 1
        if self.trainer is not None:
            rank, world_size = self.trainer.global_rank, self.trainer.world_size
            sharing = getattr(self.trainer.lightning_module, "context_parallel", 1)
        elif torch.distributed.is_available() and torch.distributed.is_initialized():
            rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        else:
            rank, world_size = 0, 1
        rank, world_size = rank // sharing, world_size // sharing
        if self.batch_size % world_size:
            raise UserError(
                f"data.batch_size is {self.batch_size}; it counts the sequences of all devices together, "
                f"so it must be a multiple of their number, {world_size}"
                f"{'.' if sharing == 1 else f' groups of {sharing}.'}"
            )
        return rank, world_size

    def state_dict(self) -> dict[str, Any]:
        """The number of samples trained on, the `identity`, and the batch size."""
        return {"position": self._trained_samples(), **self.identity(), "batch_size": self.batch_size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the checkpoint's last sample.

        The number of devices and workers may change. So may `batch_size`, with a warning: the position counts samples,
        so that none is repeated or skipped.

        Raises:
            UserError: The `identity` differs; the message has both values.
        """
        if self.trainer is not None and self.trainer.state.fn != "fit":
            return  # evaluation on other data is allowed
        for name, value in self.identity().items():
            # settings that did not exist when the checkpoint was written do not count as differences
            if (before := state_dict.get(name, value)) != value:
                raise UserError(
                    f"{self.what(name)} {value}, but the checkpoint was trained with {before}; "
                    "resume with the checkpoint's data settings, or start a new run."
                )
        if (size := state_dict["batch_size"]) != self.batch_size:
            log.warning("Resuming with data.batch_size=%d; the checkpoint had %d.", self.batch_size, size)
        self._position = state_dict["position"]
        if self._train_loader is not None:  # Lightning may create the loader before it restores
            self._train_loader.position = self._position

    def _trained_samples(self) -> int:
        if self._train_loader is None:
            return self._position
        position = self._train_loader.position
        if self.trainer is not None and self.trainer.state.fn == "fit":
            # a checkpoint in the middle of a step excludes that step and its batches
            position -= self.batch_size * unfinished_batches(self.trainer)
        return position

    def teardown(self, stage: str | None = None) -> None:
        """Stop prefetching; the position stays."""
        if self._train_loader is not None:
            self._train_loader.position = self._train_loader.position
        for loader in self._evaluating:
            loader.stop()

    def on_exception(self, exception: BaseException) -> None:
        """Stop prefetching, also in an interrupted evaluation."""
        self.teardown()


def check_minimum(**values: tuple[int | None, int]) -> None:
    """Raise a UserError for the first argument `name=(value, minimum)` whose value is below its minimum."""
    for name, (value, minimum) in values.items():
        if value is not None and value < minimum:
            raise UserError(f"data.{name} is {value}; it must be at least {minimum}.")
