"""The test split: documents of their own, which neither training nor validation nor a trained tokenizer sees."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from kernels.errors import UserError
from tests.commands import FIT, Command
from zoo.data import MixedText, Source, TextData
from zoo.data.text.shards import Shards, prepare
from zoo.data.text.split import SplitByContent, WithoutTest


@pytest.fixture
def sizes() -> dict:
    return {"vocab_size": 300, "sequence_length": 16, "batch_size": 4, "preprocessing_workers": 1}


def documents(data: TextData, split: str, test_fraction: float | None) -> list[str]:
    tokenizer = data.get_tokenizer()
    shards = Shards(prepare(data.corpus, tokenizer, 0.2, 1, test_fraction=test_fraction), split)
    return tokenizer.decode(shards.read(0, len(shards))).split("<eos>")[:-1]


def test_it_is_taken_from_training_alone(text_folder: str, sizes: dict):
    data = TextData(text_folder, **sizes)
    train, validation = (documents(data, split, None) for split in ("train", "validation"))
    parts = {split: documents(data, split, 0.3) for split in ("train", "validation", "test")}
    assert parts["validation"] == validation
    assert sorted(parts["train"] + parts["test"]) == sorted(train)
    assert len(parts["test"]) >= 5
    assert len(parts["train"]) >= 5


@pytest.mark.parametrize("text", ["".join(f"line {i} of one document\n" for i in range(100)), "x" * 50, "abc"])
def test_a_single_document_is_cut_into_three(tmp_path: Path, text: str):
    (tmp_path / "one.txt").write_text(text)
    corpus = TextData(str(tmp_path / "one.txt")).corpus
    two = dict(SplitByContent(corpus, 0.2)(text))
    three = dict(SplitByContent(corpus, 0.2, 0.1)(text))
    assert three["validation"] == two["validation"]
    assert three["train"] + three["test"] == two["train"]
    assert all(three.values())


def test_a_document_that_is_too_short_for_three_is_refused(tmp_path: Path):
    (tmp_path / "one.txt").write_text("ab")
    data = TextData(str(tmp_path / "one.txt"), vocab_size=257, test_fraction=0.3)
    with pytest.raises(UserError, match="more are needed for training, validation and test"):
        data.prepare_data()


def test_a_tokenizer_is_trained_without_it(text_folder: str, sizes: dict):
    corpus = TextData(text_folder).corpus
    seen = [*WithoutTest(corpus, 0.2, 0.3)]
    held_out = [text for text in corpus if dict([*SplitByContent(corpus, 0.2, 0.3)(text)]).get("test")]
    assert len(seen) + len(held_out) == 40
    data = MixedText({"a": Source(text_folder)}, **sizes, validation_fraction=0.2, test_fraction=0.3)
    assert not any(text in "".join(data.training_text) for text in held_out)
    assert data.get_tokenizer().hash != TextData(text_folder, **sizes).get_tokenizer().hash


def test_each_source_of_a_mixture_has_one(text_folder: str, sizes: dict):
    data = MixedText({"a": Source(text_folder), "b": Source(text_folder)}, **sizes, test_fraction=0.3)
    one, other = data.test_dataloader()
    assert len(one) == len(other) > len(data.predict_dataloader()[0])


@pytest.mark.parametrize(
    ("fractions", "said"), [((0.2, 0.8), "between 0 and 0.8"), ((0.2, 0.0), "test_fraction is 0.0")]
)
def test_fractions_out_of_range(fractions: tuple[float, float], said: str):
    with pytest.raises(UserError, match=said):
        TextData(validation_fraction=fractions[0], test_fraction=fractions[1])


@pytest.mark.parametrize(("before", "now"), [(None, 0.3), (0.3, 0.2), (0.3, None)])
@pytest.mark.parametrize("verb", ["fit", "test"])
def test_another_fraction_than_the_runs_is_refused(text_folder: str, sizes: dict, before, now, verb):
    state = TextData(text_folder, **sizes, test_fraction=before).state_dict()
    data = TextData(text_folder, **sizes, test_fraction=now)
    data.trainer = SimpleNamespace(state=SimpleNamespace(fn=verb))  # type: ignore[assignment]
    with pytest.raises(UserError, match=f"data.test_fraction is {now or 'null'}, but the checkpoint was trained with"):
        data.load_state_dict(state)


@pytest.mark.slow
def test_the_verb_measures_it(command: Command, desk: Path, finished: Path):
    without = command("test", f"--checkpoint={finished / 'runs/done'}").refused()
    assert without.err.endswith("measure the loss on the validation split by `validate`\n")
    assert "--data.test_fraction=0.05" in without.err
    sizes = ("--data.test_fraction=0.3", "--data.validation_sets={plays: {path: embedded:documentation}}")
    sizes += ("--trainer.limit_val_batches=1",)
    assert command(*FIT, *sizes, "--trainer.max_steps=1", "--run=split").code == 0
    done = command("test", "--checkpoint=runs/split").ok()
    assert re.search(r"│ test, last part of the context +│ +\d\.\d{3} │", done.out)
    assert (whole := re.search(r"tested on all (\d+) batches", done.out)), "whatever the limit in training was"
    assert int(whole[1]) > 2
    assert "plays" not in done.out, "a validation set is not test data"
