"""Runs that classify whole sequences: patches of images, and packed lists."""

import json
from pathlib import Path

import pytest

from reproductions.listops import ListOps
from tests.commands import ROOT, Command

SHORT = ("--trainer.max_steps=3", "--trainer.accelerator=cpu", "--model.num_layers=2", "--model.hidden_size=32")
LISTS = ("--data.max_length=12", "--data.batch_size=8", "--data.validation_samples=40")


def results(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


@pytest.mark.slow
def test_patches_count_as_tokens_and_labels_have_no_position(command: Command, desk: Path):
    still = ("--optim.learning_rate=1e-9", "--optim.warmup_steps=0")
    done = command("fit", "--config", "image/digits.yaml", *SHORT, *still, "--data.batch_size=8", "--run", "digits")
    assert done.code == 0, done.err
    row = results(desk / "runs/digits")
    assert row["tokens_seen"] == 3 * 8 * 16
    assert row["val_loss_by_position"] == [row["val_loss"], *[None] * 7]
    assert 0.03 < row["val_accuracy"] < 0.2, "an untrained model guesses"
    assert "accuracy" in done.out
    assert "part of the context" not in done.out
    command("fit", "--resume", "runs/digits", "--trainer.max_steps=4").ok()
    assert results(desk / "runs/digits")["tokens_seen"] == 4 * 8 * 16


@pytest.mark.slow
def test_packed_lists_are_labelled_one_by_one(command: Command, desk: Path):
    command("fit", "--config", str(ROOT / "reproductions/listops.yaml"), *SHORT, *LISTS, "--run", "lists").ok()
    row, data = results(desk / "runs/lists"), ListOps(4, 12, 4, 5, batch_size=8)
    order = data.train.order(range(24), seed=0)
    assert row["tokens_seen"] == sum(len(data.train.sample(int(index))[0]) for index in order)
    assert row["val_loss_by_position"] == [row["val_loss"], *[None] * 7]
    command("predict", "--checkpoint", "runs/lists", "--output", "losses.jsonl").ok()
    lines = [json.loads(line) for line in (desk / "losses.jsonl").read_text().splitlines()]
    losses = [loss for line in lines for loss in line["losses"]]
    assert len(losses) == 40
    assert sum(losses) / 40 == pytest.approx(row["val_loss"], rel=1e-4)


def test_a_language_model_must_be_causal(command: Command):
    done = command("fit", "--config", "hgrn2.yaml", "--config", "tiny.yaml", "--model.stack.mixer=Bidirectional")
    assert done.code == 2
    assert done.err == (
        "error: stack: Bidirectional is not causal and would see the tokens it predicts; give the model a head that "
        "labels whole sequences, such as Classifier\n"
    )


def test_benchmarks_are_about_language_models(command: Command):
    done = command("bench", "training", "--config", "image/digits.yaml").refused()
    assert done.err.startswith("error: config: benchmarks are about language models")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "accuracy"),
    [pytest.param(60, 0.65, marks=pytest.mark.slow), pytest.param(600, 0.9, marks=pytest.mark.nightly)],
)
def test_digits_are_learned(command: Command, desk: Path, steps: int, accuracy: float):
    length = (f"--trainer.max_steps={steps}", f"--trainer.val_check_interval={steps}")
    command("fit", "--config", "image/digits.yaml", "--trainer.accelerator=cpu", *length, "--run", "digits").ok()
    row = results(desk / "runs/digits")
    assert row["val_accuracy"] > accuracy
    assert row["val_loss_mixers_zeroed"] > 2, "single patches say little"
