import logging
import os

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from kernels import UserError
from zoo.config import read
from zoo.runs.build import parts
from zoo.runs.errors import FirstBatch, errors_explained, quiet


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MisconfigurationException("You set `x`\nand y."), "trainer: You set `x` and y."),
        (UserError("a mistake"), "a mistake"),
    ],
)
def test_mistakes_are_one_sentence(error: Exception, expected: str):
    with pytest.raises(UserError) as caught, errors_explained():
        raise error
    assert str(caught.value) == expected


def test_other_errors_stay_as_they_are():
    with pytest.raises(KeyError, match="a bug"), errors_explained():
        raise KeyError("a bug")


@pytest.mark.parametrize(("rank", "said"), [("0", 2), ("1", 1)])
def test_a_warning_of_all_processes_is_said_by_the_first(rank, said, monkeypatch, caplog):
    monkeypatch.setenv("LOCAL_RANK", rank)
    warm_up, of_one = (logging.getLogger(name) for name in ("zoo.train.optim", "zoo.train.module"))
    with quiet():
        warm_up.warning("the run ends within its warm-up")
        of_one.warning("a batch has no label")
    assert len(caplog.records) == said
    assert warm_up.isEnabledFor(logging.WARNING)


def test_more_processes_than_cores(caplog):
    config = read("gla.yaml", "trainer.devices=10000", "model.hidden_size=32", "model.num_heads=1", "data=MarkovChain")
    parts(config)
    said = [record.message for record in caplog.records if "devices" in record.message]
    assert said == [f"trainer.devices: 10000 processes share {os.cpu_count()} CPU cores, and each holds the model"]


def test_the_first_batch_is_told_once():
    told: list[str] = []
    first_batch = FirstBatch(lambda: told.append("now"))
    for _ in range(3):
        first_batch.on_train_batch_end()
    assert told == ["now"]
