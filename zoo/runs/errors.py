"""Errors and warnings of a Trainer as a user should see them."""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from kernels import Option, UserError
from zoo.train.signals import interruptible

# messages that tell a user nothing to act upon
NOT_FOR_USERS = (
    "isinstance.treespec",
    "LeafSpec",
    "many workers",
    "infer the batch indices",
    "callbacks used to create",
    "overridden `transfer_batch_to_device`",  # on purpose: batches of any data module
    "is deprecated. Please use `torch.distributed",  # called by DeepSpeed
    "torch._prims_common.check",  # called by PyTorch's own compiler
    "sync_dist=True",  # our metrics cover all processes already
)
LEVELS = {
    "lightning.pytorch": logging.WARNING,
    "lightning.fabric": logging.WARNING,
    "lightning.pytorch.profilers": logging.INFO,  # the table of trainer.profiler=simple
}
# raised by Lightning for a checkpoint that holds something else than the numbers and mappings it expects
_OF_WRONG_STATES = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence library warnings that a user cannot act on, inside the block or the decorated function."""
    before = {name: logging.getLogger(name).level for name in LEVELS}
    for name, level in LEVELS.items():
        logging.getLogger(name).setLevel(level)
    try:
        with warnings.catch_warnings():
            for pattern in NOT_FOR_USERS:
                warnings.filterwarnings("ignore", message=f".*{pattern}.*")
            yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


class FirstBatch(Callback):
    """Notes that a batch was finished after the training state was restored.

    Args:
        trained: Called after the first batch of training.
    """

    def __init__(self, trained: Callable[[], None] | None = None) -> None:
        self.finished, self._trained = False, trained

    def _note(self, *_: Any, **__: Any) -> None:
        self.finished = True

    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _note

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        self._note()
        if self._trained is not None:
            self._trained()
            self._trained = None

    def on_sanity_check_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Forget the batches before the first step, which do not use the training state."""
        self.finished = False


@contextmanager
def errors_explained(trainer: L.Trainer, foreign: Path | None, first_batch: FirstBatch) -> Iterator[None]:
    """Turn errors of a trainer that are not bugs into a UserError of one sentence, or into KeyboardInterrupt.

    Args:
        trainer: The trainer that runs inside the block.
        foreign: The checkpoint that is restored, if somebody else wrote it.
        first_batch: A callback of the trainer.
    """
    with interruptible():
        try:
            yield
        except Exception as error:
            if isinstance(error, UserError):
                raise
            if foreign is not None and not first_batch.finished and isinstance(error, _OF_WRONG_STATES):
                cause = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                raise UserError(
                    f"{foreign} was not written by you, and its state cannot be restored ({cause}); a new run can "
                    "start from its weights: ",
                    Option("optim.initial_weights", str(foreign)),
                ) from error
            if isinstance(error, MisconfigurationException) or str(error).startswith(
                "Early stopping conditioned on metric"
            ):
                raise trainer_error(error) from None
            raise


def trainer_error(error: Exception) -> UserError:
    """Lightning's message about a config, which names the argument, as one sentence."""
    return UserError(f"trainer: {' '.join(str(error).split())}")
