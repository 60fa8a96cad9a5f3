"""Silence library warnings that a user cannot act on."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# in messages that tell a user nothing to act upon
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
    """Hide them inside; before and after, warnings and levels of logs are the caller's own. Decorates, too."""
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
