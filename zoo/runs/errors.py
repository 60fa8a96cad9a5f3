"""Errors and warnings of a Trainer as a user should see them."""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from kernels import UserError
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
            raise


def trainer_error(error: Exception) -> UserError:
    """Lightning's message about a config, which names the argument, as one sentence."""
    return UserError(f"trainer: {' '.join(str(error).split())}")
