"""The model card that `convert` writes: what the run knows is in it, and what it does not is marked."""

import re
from pathlib import Path

import pytest
import yaml

import zoo
from tests.commands import Command
from tests.zoo.saved.public.public_folder import write

pytest_plugins = "tests.desk"


def table(card: str) -> dict[str, str]:
    """The rows of its table."""
    return dict(re.findall(r"^\| ([^|]+?) \| (.+?) \|$", card, re.MULTILINE))


@pytest.mark.slow
def test_a_run_describes_itself(command: Command, desk: Path):
    (desk / "gla.yaml").write_text(
        "model: {stack: {class_path: Uniform, init_args: {mixer: {class_path: GLA, init_args: {norm_eps: 1.0e-6}}}}}"
    )
    (desk / "notes.txt").write_text("What is written here is learned here. " * 2000)
    run = ("--config", "./gla.yaml", "--config", "tiny.yaml", "--run", "first", "--data.path=notes.txt")
    assert command("fit", *run, "--trainer.max_steps=2", "--trainer.val_check_interval=2").code == 0
    done = command("convert", "--checkpoint", "runs/first", "--to=fla", "--output", "published/small-gla")
    assert done.code == 0, done.err
    card = (desk / "published/small-gla/README.md").read_text()
    rows, model, row = table(card), zoo.load("runs/first"), zoo.train.results.read_row(desk / "runs/first")
    assert row is not None
    assert rows["layers"] == "3 of GLA, 32 channels wide"
    assert rows["parameters"] == f"{model.num_parameters():,}"
    assert rows["state of a sequence"].startswith(f"{model.state_size():,} numbers")
    assert rows["trained on"] == f"{2 * 2 * 32} tokens"
    assert rows["data"] == "`notes.txt`"
    assert rows["validation loss"].startswith(f"{row['val_loss']:.3f} nats per token over 2 batches")
    assert "to be filled in" in rows["licence"]
    assert "import fla" in card
    assert 'from_pretrained("small-gla")' in card
    header = yaml.safe_load(card.split("---\n")[1])
    assert header == {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["GLA"]}


@pytest.mark.slow
def test_a_model_that_was_trained_on_says_from_what(desk: Path):
    zoo.convert(write(desk / "theirs"), desk / "ours")
    short = {
        "data": {"sequence_length": 32, "batch_size": 2, "max_characters": 20000, "tokenizer": "ours"},
        "trainer": {"max_steps": 1, "limit_val_batches": 1, "accelerator": "cpu"},
    }
    zoo.fit("ours/config.yaml", short, "optim.initial_weights=ours", run="more")
    zoo.convert("runs/more", "back", to="fla")
    rows = table((desk / "back" / "README.md").read_text())
    assert rows["trained on"] == "64 tokens, after those of `ours`, whose weights it started from"


def test_what_nobody_knows_is_marked(desk: Path):
    zoo.convert(write(desk / "theirs"), desk / "ours")
    assert not (desk / "ours" / "README.md").exists()  # only what is to be published has a card
    zoo.convert("ours", "back", to="fla")
    rows = table((desk / "back" / "README.md").read_text())
    assert rows["layers"] == "2 of GLA, 32 channels wide"
    for name in ("trained on", "data", "validation loss", "context in training", "licence"):
        assert rows[name].startswith("*to be filled in*"), name


@pytest.mark.slow
@pytest.mark.parity
def test_transformers_loads_what_has_a_card(command: Command, desk: Path):
    transformers = pytest.importorskip("transformers")
    run = ("--config", "transformer.yaml", "--config", "tiny.yaml", "--run", "first")
    assert command("fit", *run, "--trainer.max_steps=1", "--trainer.val_check_interval=1").code == 0
    assert command("convert", "--checkpoint", "runs/first", "--to=huggingface", "--output", "out").code == 0
    card = (desk / "out" / "README.md").read_text()
    assert table(card)["state of a sequence"] == "grows with the text"
    assert "import fla" not in card
    assert len(transformers.AutoModelForCausalLM.from_pretrained("out").model.layers) == 3
