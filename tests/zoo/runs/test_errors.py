import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from kernels import UserError
from zoo.runs.errors import FirstBatch, errors_explained


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MisconfigurationException("You set `x`\nand y."), "trainer: You set `x` and y."),
        (RuntimeError("Early stopping conditioned on metric `a`"), "trainer: Early stopping conditioned on metric `a`"),
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


def test_the_first_batch_is_told_once():
    told: list[str] = []
    first_batch = FirstBatch(lambda: told.append("now"))
    for _ in range(3):
        first_batch.on_train_batch_end()
    assert told == ["now"]
