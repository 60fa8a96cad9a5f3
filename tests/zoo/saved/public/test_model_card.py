"""The model card that `convert` writes: a template with the size, the mixers and how to load the model."""

from pathlib import Path

import pytest
import yaml

import zoo
from tests.commands import Command
from tests.zoo.saved.public.public_folder import write


def test_its_places(desk: Path):
    zoo.convert(write(desk / "theirs"), desk / "ours")
    assert not (desk / "ours" / "README.md").exists()  # only what is to be published has a card
    zoo.convert("ours", "back", to="fla")
    card, model = (desk / "back" / "README.md").read_text(), zoo.load("ours")
    sentence = f"A language model of 2 layers of GLA with {model.num_parameters():,} parameters"
    assert sentence in card
    assert "{" not in card
    assert "*To be filled in*: the training data, the evaluation, the licence" in card
    assert "import fla  # flash-linear-attention, on a GPU\nfrom transformers" in card
    assert 'from_pretrained("back")' in card
    header = yaml.safe_load(card.split("---\n")[1])
    assert header == {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["GLA"]}


@pytest.mark.slow
def test_nothing_of_a_foreign_run_is_in_it(command: Command, desk: Path):
    """Paths of data and weights, which a stranger chooses, could be Markdown, and sections of any type."""
    zoo.convert(write(desk / "theirs"), desk / "ours")
    evil = "![x](http://evil.example/x) </table>"
    config = yaml.safe_load((desk / "ours" / "config.yaml").read_text())
    for number, sections in enumerate(
        (
            {"data": {"class_path": evil, "init_args": {"path": evil}}, "optim": {"initial_weights": evil}},
            {"data": [evil], "optim": 3},
            {"data": {"init_args": {"sources": {"a": 3}}}, "optim": {"initial_weights": [1]}},
            {"data": {"init_args": 7}},
            {"data": {"class_path": 5}},
        )
    ):
        (desk / "ours" / "hashes.json").unlink(missing_ok=True)
        (desk / "ours" / "config.yaml").write_text(yaml.safe_dump({**config, **sections}))
        command("convert", "--checkpoint=ours", "--to=fla", f"--output=back{number}").ok()
        assert "evil" not in (desk / f"back{number}" / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parity
def test_transformers_loads_what_has_a_card(command: Command, desk: Path):
    transformers = pytest.importorskip("transformers")
    run = ("--config", "transformer.yaml", "--config", "tiny.yaml", "--run", "first")
    assert command("fit", *run, "--trainer.max_steps=1", "--trainer.val_check_interval=1").code == 0
    assert command("convert", "--checkpoint", "runs/first", "--to=huggingface", "--output", "out").code == 0
    assert "import fla" not in (desk / "out" / "README.md").read_text()
    assert len(transformers.AutoModelForCausalLM.from_pretrained("out").model.layers) == 3
