"""Errors and warnings of a Trainer as a user should see them."""

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from kernels import UserError
from zoo.lm.block import OF_LAYER
from zoo.train.signals import interruptible

# messages that tell a user nothing to act upon
NOT_FOR_USERS = (
    "isinstance.treespec",
    "LeafSpec",
    "many workers",
    "infer the batch indices",
    "callbacks used to create",
    "overridden `transfer_batch_to_device`",  # on purpose: batches of any data module
    "overridden the `LightningModule.backward`",  # for deterministic mode, which does not change DeepSpeed's
    "is deprecated. Please use `torch.distributed",  # called by DeepSpeed
    "torch._prims_common.check",  # called by PyTorch's own compiler
    "sync_dist=True",  # our metrics cover all processes already
)
LEVELS = {
    "lightning.pytorch": logging.WARNING,
    "lightning.fabric": logging.WARNING,
    "lightning.pytorch.profilers": logging.INFO,  # the table of trainer.profiler=simple
}
# loggers whose warnings are the same in all processes of a machine
SAID_BY_THE_FIRST = ("zoo.config", "zoo.data", "zoo.lm", "zoo.runs", "zoo.saved", "zoo.train.optim")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence library warnings that a user cannot act on, inside the block or the decorated function.

    What all processes of a machine would say, the first one says.
    """
    later = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))) > 0
    levels = LEVELS | (dict.fromkeys(SAID_BY_THE_FIRST, logging.ERROR) if later else {})
    before = {name: logging.getLogger(name).level for name in levels}
    for name, level in levels.items():
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
    """Calls a function after the first batch of training."""

    def __init__(self, trained: Callable[[], None]) -> None:
        self._trained: Callable[[], None] | None = trained

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        """Call it."""
        if self._trained is not None:
            self._trained()
            self._trained = None


@contextmanager
def errors_explained() -> Iterator[None]:
    """Turn errors of a trainer that are not bugs into a UserError of one sentence, or into KeyboardInterrupt."""
    with interruptible():
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            if isinstance(error, MisconfigurationException) or str(error).startswith(
                "Early stopping conditioned on metric"
            ):
                raise trainer_error(error) from None
            for note in getattr(error, "__notes__", ()):
                if note.startswith(OF_LAYER) and not isinstance(error, torch.OutOfMemoryError):
                    raise UserError(note) from error
            raise


def trainer_error(error: Exception) -> UserError:
    """Lightning's message about a config, which names the argument, as one sentence."""
    return UserError(f"trainer: {' '.join(str(error).split())}")
