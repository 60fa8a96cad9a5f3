"""`reproductions/cost_over_size.py`: each cell is measured once, in micro-batches that fit, and written immediately."""

import csv
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from docs import draw_cost_over_size
from reproductions import cost_over_size as cost
from tests.zoo.train.test_captured_step import Repeated
from zoo import config as configs
from zoo.performance.model import build, mean_loss, read
from zoo.performance.training import DOES_NOT_FIT, TimedLearner
from zoo.train.captured_step import CapturedStep

CPU = torch.device("cpu")
SMALL = cost.Size(16, 1, 32, (1, 1, 1), 32)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first size is one of a moment."""
    monkeypatch.setitem(cost.SIZES, "60M", SMALL)


def lines(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as stream:
        return [*csv.DictReader(stream)]


@pytest.mark.slow
def test_rows_are_appended_and_not_measured_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    options = ["--sizes=[60M]", "--length=16", "--steps=2", f"--file={tmp_path}/cost.csv", "--device=cpu"]
    cost.main(["--models=[gla]", "--tokens=[32,64]", *options])
    rows = lines(tmp_path / "cost.csv")
    assert [(row["model"], row["tokens"], row["mode"], row["micro_batches"]) for row in rows] == [
        ("gla", "32", "eager", "1"),
        ("gla", "64", "eager", "2"),
    ]
    assert all(
        float(row["tokens_per_second"]) == pytest.approx(1e3 * int(row["tokens"]) / float(row["step_ms"]))
        for row in rows
    )
    capsys.readouterr()
    cost.main(["--models=[gla,attention]", "--tokens=[32]", *options, "--seconds=100"])
    assert lines(tmp_path / "cost.csv")[:2] == rows
    assert [row["model"] for row in lines(tmp_path / "cost.csv")[2:]] == ["attention"]
    assert "gla" not in capsys.readouterr().out


def test_a_step_in_micro_batches_is_a_step():
    """Eager and captured: the same parameters as after one pass over all sequences."""
    parsed = read(cost.config_of("gla", "60M"))
    samples = torch.randint(32, (4, 17), generator=torch.Generator().manual_seed(1))

    def trained(number: int, captured: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = build(parsed, "32-true", CPU)
        parts = iter([*samples.chunk(number)] * 100)
        learner = TimedLearner(
            model,
            configs.instantiate("optim", parsed),
            "32-true",
            "auto",
            lambda: mean_loss(model, next(parts)),
            micro_batches=number,
        )
        if captured:
            step = CapturedStep(lambda: (mean_loss(model, samples[:4]),), model.parameters(), Repeated())
            learner.captured, learner.optimizer.replay = step, partial(step.update, learner.optimizer)
        for _ in range(3):
            learner.step()
        assert learner.measured(samples.numel())["step_ms"] > 0
        return [parameter.detach().clone() for parameter in model.parameters()]

    once = trained(1, captured=False)
    for other in (trained(2, captured=False), trained(2, captured=True)):
        for x, y in zip(once, other, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("size", cost.SIZES)
def test_models_have_the_parameters_of_their_size(size: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    nominal = float(size[:-1]) * {"M": 1e6, "B": 1e9}[size[-1]]
    for model in cost.MODELS:
        built = build(read(cost.config_of(model, size)), "32-true", torch.device("meta"))
        assert built.num_parameters() == pytest.approx(nominal, rel=0.2 if size == "5M" else 0.04)


@pytest.mark.slow
@pytest.mark.parametrize("mfu", [None, 0.3])
def test_the_picture(tmp_path: Path, mfu: float | None):
    """A panel for each number of tokens, and below it the use of the GPU where it is known."""
    rows = [
        {"device": "a GPU", "precision": "bf16-mixed", "model": model, "size": size, "tokens": tokens, "mode": mode}
        | {"parameters": number, "tokens_per_second": tokens * 1e6 / number, "mfu": mfu}
        for model, mode in (("gla", "eager"), ("gla", "captured"), ("llama", "eager"))
        for size, number in (("5M", 5.1e6), ("1.3B", 1.31e9))
        for tokens in (8192, 32768)
    ]
    for row in [*rows, {"model": "gla", "size": "5M", "tokens": 1, "mode": "eager", "note": DOES_NOT_FIT}]:
        cost.append(row, tmp_path / "cost.csv")
    panels = draw_cost_over_size.figure(draw_cost_over_size.read(tmp_path / "cost.csv")).axes
    assert [axes.get_title() for axes in panels] == ["8,192 tokens in a step", "32,768 tokens in a step"] + 2 * [""] * (
        mfu is not None
    )
    assert np.ptp(imread(draw_cost_over_size.draw(tmp_path, tmp_path / "cost.csv"))) > 0.5
