"""Text that is validated on beside the split: all of it, by itself, without a part in anything else."""

import json
from itertools import chain
from pathlib import Path

import pytest

from kernels.errors import UserError
from tests.commands import FIT, Command
from zoo.data import MixedText, Source, TextData, ValidationSet
from zoo.data.text.files import zstd

PLAYS = ["a play in one act, and no other. " * 4, "another play, in two acts. " * 3, "a third one, which is long. " * 5]


@pytest.fixture
def plays(tmp_path: Path) -> str:
    """Three documents in the field `body` of JSON lines, compressed."""
    file = tmp_path / "plays.jsonl.zst"
    file.write_bytes(zstd.compress("".join(json.dumps({"body": play}) + "\n" for play in PLAYS).encode()))
    return str(file)


@pytest.fixture
def arguments(text_folder: str) -> dict:
    return {"path": text_folder, "vocab_size": 300, "sequence_length": 16, "batch_size": 4, "preprocessing_workers": 1}


def tokens(loader) -> list[int]:
    return list(chain.from_iterable(batch.tokens.flatten().tolist() for batch in loader))


def test_all_of_a_set_is_used_and_the_split_stays_what_it_is(arguments: dict, plays: str):
    alone = TextData(**arguments)
    data = TextData(**arguments, validation_sets={"plays": ValidationSet(plays, "body")})
    split, beside = data.val_dataloader()
    assert tokens(split) == tokens(alone.val_dataloader()) == tokens(data.predict_dataloader())
    assert data.identity() == alone.identity(), "a run can be continued with other sets"
    tokenizer = data.get_tokenizer()
    text = [*chain.from_iterable([*tokenizer.encode(play), tokenizer.eos_id] for play in PLAYS)]
    found = tokens(beside)[: len(beside.samples) * 16]
    assert found == text[: len(found)]
    assert len(text) - len(found) <= 16
    assert data.extra_sets == ["plays"]


def test_a_mixture_has_them_after_its_sources(arguments: dict, plays: str):
    sources = {"words": Source(arguments.pop("path"))}
    data = MixedText(sources, **arguments, validation_sets={"plays": ValidationSet(plays, "body")})
    assert data.validation_names == ["words"]
    assert len(data.val_dataloader()) == 2
    assert len(data.predict_dataloader()) == 1
    with pytest.raises(UserError, match=r"data\.validation_sets: 'words' is also the name of a source; give it anoth"):
        MixedText(sources, **arguments, validation_sets={"words": ValidationSet(plays, "body")})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_run_says_its_loss_and_chooses_by_the_split_alone(command: Command, desk: Path, plays: str):
    sets = f"--data.validation_sets={{plays: {{path: {plays}, text_field: body}}}}"
    base = [*FIT, "--trainer.max_steps=2", "--trainer.val_check_interval=1"]
    assert command(*base, "--run", "without").code == 0
    done = command(*base, sets, "--run", "with").ok()
    without, row = (json.loads((desk / "runs" / run / "results.json").read_text()) for run in ("without", "with"))
    loss = row["val_loss_by_task"]["plays"]
    assert row["val_loss"] == without["val_loss"] != loss
    assert row["val_accuracy"] == without["val_accuracy"]
    assert f"validation, plays                     │ {loss:>14.3f}" in done.out
    metrics = [json.loads(line) for line in (desk / "runs" / "with" / "metrics.jsonl").read_text().splitlines()]
    logged = [line["val_loss_plays"] for line in metrics if "val_loss_plays" in line]
    assert len(logged) == 2
    assert logged[-1] == pytest.approx(loss)
    again = command("validate", "--checkpoint", "runs/with").ok()
    assert "│ validation, plays " in again.out


WRONG = {
    "{plays: {path: missing.txt}}": "data.validation_sets.plays.path: ",
    "{a.b: {path: plays.txt}}": "data.validation_sets: the name 'a.b' may have letters, digits, '_' and '-' only.",
    "{plays: {path: plays.txt, weight: 2}}": "weight",
    "{plays: {path: plays.txt}}": "data.validation_sets.plays: data.sequence_length is",
}


@pytest.mark.slow
@pytest.mark.parametrize("value", WRONG)
def test_a_mistake_is_one_sentence(value: str, command: Command, desk: Path):
    (desk / "plays.txt").write_text("short")
    said = command(*FIT, f"--data.validation_sets={value}").sentence()
    assert WRONG[value] in said
    assert "validation_fraction" not in said
