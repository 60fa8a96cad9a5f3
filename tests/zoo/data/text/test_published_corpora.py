"""A published corpus by its config, as a reader has it: what is missing or damaged is named, and the rest is used."""

import json
from pathlib import Path

import pytest

from tests.commands import FIT, Command
from zoo.data import Corpus, train_tokenizer
from zoo.data.text.files import zstd

RUN = [*FIT, "--config", "data/slimpajama.yaml", "--config", "tiny.yaml", "--data.preprocessing_workers=1"]


def example(number: int) -> bytes:
    rows = [{"text": f"row {row} of {number}: " + "some words of it " * 20, "meta": {}} for row in range(40)]
    return zstd.compress("".join(json.dumps(row) + "\n" for row in rows).encode())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_from_nothing_to_a_loss(command: Command, desk: Path):
    def said() -> str:
        return command(*RUN, "--run", "first").sentence()

    message = said()
    assert "data.tokenizer: tokenizers/mistral/tokenizer.json does not exist; a tokenizer.json or a folder" in message
    assert "as the header of the config says" in message
    (desk / "tokenizers" / "mistral").mkdir(parents=True)
    train_tokenizer(Corpus(max_characters=50_000), 300).save(desk / "tokenizers" / "mistral")
    train, holdout = desk / "corpora" / "slimpajama" / "train", desk / "corpora" / "slimpajama" / "validation"
    assert f"data.path: {train} does not exist; put text there, or give another path." in said()
    (train / "chunk1").mkdir(parents=True)
    for number in range(2):
        (train / "chunk1" / f"example_train_{number}.jsonl.zst").write_bytes(example(number))
    assert f"data.validation_sets.slimpajama.path: {holdout} does not exist; put text there" in said()
    (holdout / "chunk1").mkdir(parents=True)
    damaged = holdout / "chunk1" / "example_holdout_0.jsonl.zst"
    damaged.write_bytes(example(2)[:-9])
    assert f"data.validation_sets.slimpajama.path: {damaged} cannot be read (Compressed file ended before" in said()
    damaged.write_bytes(example(2))
    command(*RUN, "--run", "first").ok()
    row = json.loads((desk / "runs" / "first" / "results.json").read_text())
    assert row["val_loss_by_task"]["slimpajama"] > 0
