"""Overrides of which one would have no effect, and whole numbers in other notations."""

import json
from pathlib import Path

import pytest
import yaml

from tests.commands import FIT, Command


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["--data.tokenizer=a.json", "--data.vocab_size=4096"],
            "data.vocab_size: 4096 is the size of a tokenizer that",
        ),
        (["--data.vocab_size=4096", "--data.init_args.tokenizer=a.json"], "data.vocab_size: 4096 is the size of a"),
        (["--data.path=notes", "--data.max_characters=100"], "data.max_characters: 100 is the size of text that comes"),
    ],
)
def test_overrides_without_effect_are_refused(command: Command, overrides: list[str], message: str):
    done = command(*FIT, *overrides)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert message in done.err


@pytest.mark.slow
def test_a_config_may_have_what_an_override_makes_useless(command: Command, finished: Path, desk: Path):
    command(*FIT, f"--data.tokenizer={finished / 'runs/done/tokenizer.json'}", "--trainer.max_steps=1").ok()
    done = command(*FIT, "--data.path=embedded:documentation", "--data.max_characters=90000", "--trainer.max_steps=1")
    assert done.code == 0, done.err


@pytest.mark.slow
@pytest.mark.parametrize("number", ["1e2", "100.0", "1.0e+2", "100"])
def test_whole_numbers_may_be_written_as_others(command: Command, desk: Path, number: str):
    overrides = [f"--trainer.max_steps={number}", f"--data.vocab_size={number}", f"--model.num_layers={number}"]
    overrides += ["--trainer.limit_val_batches=1.0", f"--trainer.log_every_n_steps={number}"]
    (desk / "more.yaml").write_text(f"checkpoints: {{every_n_steps: {number}, keep_every_n_steps: {number}}}\n")
    done = command(*FIT, "--config", "more.yaml", *overrides, "--optim.weight_decay=2e0", "--print_config").ok()
    config = yaml.safe_load(done.out)
    values = [config["trainer"]["max_steps"], config["data"]["init_args"]["vocab_size"], config["model"]["num_layers"]]
    values += [config["checkpoints"]["every_n_steps"], config["checkpoints"]["keep_every_n_steps"]]
    assert [(value, type(value)) for value in values] == [(100, int)] * 5
    assert json.dumps(config["trainer"]["limit_val_batches"]) == "1.0"
    assert json.dumps(config["optim"]["weight_decay"]) == "2.0"
