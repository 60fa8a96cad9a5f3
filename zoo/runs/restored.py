"""Training states in checkpoints of others, which may hold anything where Lightning expects numbers and mappings."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from kernels import UserError

_OF_WRONG_STATES = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class Begun(Callback):
    """Notes that a batch was finished after the training state was restored."""

    def __init__(self) -> None:
        self.begun = False

    def _note(self, *_: Any, **__: Any) -> None:
        self.begun = True

    on_train_batch_end = on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _note

    def on_sanity_check_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Forget the batches before the first step, which do not use the training state."""
        self.begun = False


@contextmanager
def restoration_explained(checkpoint: Path | None, watched: Begun) -> Iterator[None]:
    """Turn an error before the first batch of a foreign checkpoint into a UserError that names it.

    The checkpoint is None if the user wrote it: its errors are bugs.
    """
    try:
        yield
    except UserError:
        raise
    except _OF_WRONG_STATES as error:
        if checkpoint is None or watched.begun:
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UserError(
            f"{checkpoint} was not written by you, and its state cannot be restored ({reason}); a new run can start "
            f"from its weights: --optim.initial_weights={checkpoint}"
        ) from error
