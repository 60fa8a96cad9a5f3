from pathlib import Path

import lightning as L
import pytest

from kernels import UserError
from zoo.runs.errors import FirstBatch, errors_explained


@pytest.fixture(scope="module")
def trainer() -> L.Trainer:
    return L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)


def test_a_foreign_state_that_cannot_be_restored(trainer: L.Trainer):
    with (
        pytest.raises(UserError, match=r"theirs.ckpt was not written by you, and its state cannot .*KeyError: 'loops'"),
        errors_explained(trainer, Path("theirs.ckpt"), FirstBatch()),
    ):
        raise KeyError("loops")


@pytest.mark.parametrize("checkpoint", [None, Path("theirs.ckpt")])
def test_other_errors_stay_as_they_are(trainer: L.Trainer, checkpoint: Path | None):
    first_batch = FirstBatch()
    first_batch.on_train_batch_end()
    with pytest.raises(KeyError, match="a bug"), errors_explained(trainer, checkpoint, first_batch):
        raise KeyError("a bug")
    with pytest.raises(UserError, match="a mistake"), errors_explained(trainer, checkpoint, FirstBatch()):
        raise UserError("a mistake")
