from pathlib import Path

import pytest

from kernels import UserError
from zoo.runs.restored import Begun, restoration_explained


def test_a_foreign_state_that_cannot_be_restored():
    with (
        pytest.raises(UserError, match=r"theirs.ckpt was not written by you, and its state cannot .*KeyError: 'loops'"),
        restoration_explained(Path("theirs.ckpt"), Begun()),
    ):
        raise KeyError("loops")


@pytest.mark.parametrize("checkpoint", [None, Path("theirs.ckpt")])
def test_other_errors_stay_as_they_are(checkpoint: Path | None):
    watched = Begun()
    watched.on_train_batch_end()
    with pytest.raises(KeyError, match="a bug"), restoration_explained(checkpoint, watched):
        raise KeyError("a bug")
    with pytest.raises(UserError, match="a mistake"), restoration_explained(checkpoint, Begun()):
        raise UserError("a mistake")
