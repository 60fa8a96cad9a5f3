"""The verb `statex`, and training on what it wrote."""

import errno
import os
from pathlib import Path

import pytest
import torch
import yaml

import zoo
from tests.commands import Command
from zoo.evaluation import evaluate

from .subjects import exported

pytestmark = pytest.mark.slow

TRAIN = ("--config", "larger/config.yaml", "--config", "tiny.yaml", "--optim.initial_weights=larger/")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Exported folders; only to be read."""
    folder = tmp_path_factory.mktemp("models")
    return {name: exported(folder / name, name) for name in ("GLA", "Mamba2", "transformer", "hybrid")}


def test_sizes_and_layers_are_printed(command: Command, models: dict[str, Path], desk: Path):
    done = command(
        "statex", "--checkpoint", str(models["Mamba2"]), "--layers", "2", "--init=preserve", "--output=larger/"
    ).ok()
    before, after = zoo.load(models["Mamba2"]), zoo.load(desk / "larger")
    for model in (before, after):
        assert f"{model.num_parameters():,}" in done.out
        assert f"{model.state_size():,}" in done.out
    assert "layers 0, 2: Mamba2, widen: state_dim=32" in done.out
    assert "next: python cli.py fit --config larger/config.yaml --optim.initial_weights=larger" in done.out
    config = yaml.safe_load((desk / "larger" / "config.yaml").read_text())
    assert config["model"]["stack"]["init_args"]["pattern"] == "BABA"
    assert sorted(path.name for path in desk.iterdir()) == ["larger", "tiny.yaml"]


def test_a_run_grows_is_trained_on_and_evaluated(command: Command, finished: Path, desk: Path):
    run = str(finished / "runs" / "done")
    command("statex", "--checkpoint", run, "--layers=[0,1]", "--init=inherit", "--factor=2", "--output", "larger/").ok()
    assert zoo.load_tokenizer("larger").to_json() == zoo.load_tokenizer(run).to_json()
    rest = ("--run", "longer", "--data.tokenizer=larger/tokenizer.json")
    command("fit", *TRAIN, *rest, "--optim.train_only=[layers.0.*,layers.1.*]").ok()
    before, after = zoo.load("larger").state_dict(), zoo.load("runs/longer").state_dict()
    stayed = {name for name in before if torch.equal(before[name], after[name])}
    assert stayed == {name for name in before if not name.startswith(("layers.0.", "layers.1."))}
    assert [row["task"] for row in evaluate("larger", "passkey", lengths=[64], samples=2, output="evaluated")]


def test_the_recipe_needs_no_config_of_the_larger_model(command: Command, tmp_path: Path, desk: Path):
    model = exported(tmp_path / "model", "GLA", "model.vocab_size=512")
    assert command("statex", "--checkpoint", str(model), "--layers=2", "--output=larger/").code == 0
    data = ("--data.sequence_length=32", "--data.max_characters=200000", "--data.vocab_size=512")
    steps = ("--trainer.max_steps=1", "--trainer.accumulate_grad_batches=1", "--trainer.limit_val_batches=1")
    recipe = ("fit", "--config", "train/statex.yaml", "--trainer.val_check_interval=1", "--trainer.accelerator=cpu")
    command(*recipe, *data, *steps, "--optim.initial_weights=larger/", "--run=more").ok()
    trained, larger = zoo.load("runs/more"), zoo.load("larger")
    assert trained.state_dict().keys() == larger.state_dict().keys()
    assert trained.state_size() == larger.state_size()
    config = yaml.safe_load((desk / "larger" / "config.yaml").read_text())
    config["model"]["stack"]["init_args"]["mixers"]["B"]["class_path"] = "far_away.Mixer"
    (desk / "larger" / "hashes.json").unlink()
    (desk / "larger" / "config.yaml").write_text(yaml.safe_dump(config))
    done = command(*recipe, "--optim.initial_weights=larger/").refused()
    assert "config.yaml was not written by you, and its model.stack" in done.err


MISTAKES = {
    ("GLA", "--init=reinitt"): ("init", "'reinitt'", "reinit"),
    ("GLA", "--init=preserve"): ("init: preserve is impossible where heads of GLA are merged", "scores of all heads"),
    ("GLA", "--layers=5"): ("layers: 5 is not between 1 and 4, the number of layers that can grow",),
    ("GLA", "--layers=0"): ("layers: 0 is not between 1 and 4",),
    ("GLA", "--layers=[0,4]"): ("layers: there is no layer 4; the model has the layers 0 to 3",),
    ("GLA", "--layers=[1,1]"): ("layers: [1, 1] is not a list of different layers",),
    ("GLA", "--layers=[]"): ("layers: [] is not a list of different layers",),
    ("GLA", "--layers=some"): ("layers", "'some'"),
    ("GLA", "--factor=3"): ("factor: 3 does not divide the 2 heads of GLA",),
    ("GLA", "--factor=1"): ("factor: 1 must be at least 2",),
    ("GLA", "--way=widen"): ("way: 'widen' is not one of expand, merge",),
    ("GLA", "--way=merged"): ("way: 'merged' is not one of expand, merge; did you mean 'merge'?",),
    ("GLA", "--state_dim=512"): ("state_dim",),
    ("GLA", "--max_shard_size=0"): ("max_shard_size: 0 must be at least 1 byte",),
    ("GLA", "--output=tiny.yaml"): ("output: tiny.yaml exists already",),
    ("GLA", "--output=tiny.yaml/larger"): ("output: tiny.yaml/larger cannot be written",),
    ("transformer", "--layers=1"): ("layers: none can grow; layer 0 is a SoftmaxAttention, which has no matrix state",),
    ("hybrid", "--layers=[2]"): (
        "layers: layer 2 cannot grow, since it is a SlidingWindowAttention, which has no matrix",
    ),
    ("hybrid", "--layers=[0]", "--way=merge"): ("layer 0 cannot grow, since it is a Mamba2 and the way is 'merge'",),
    ("nothing", "--layers=1"): ("checkpoint: there is nothing at",),
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=" ".join)
def test_a_mistake_is_one_sentence_and_nothing_is_written(
    mistake: tuple[str, ...], command: Command, models: dict[str, Path], desk: Path
):
    name, *options = mistake
    said = command("statex", "--checkpoint", str(models.get(name, "nothing")), "--output=larger", *options).sentence()
    assert all(part in said for part in MISTAKES[mistake]), said
    assert [path.name for path in desk.iterdir()] == ["tiny.yaml"]


def test_a_full_disk_leaves_nothing(
    command: Command, models: dict[str, Path], desk: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    done = command("statex", "--checkpoint", str(models["GLA"]), "--layers=1", "--output=larger")
    assert (done.code, done.err) == (2, "error: output: larger cannot be written: No space left on device\n")
    assert [path.name for path in desk.iterdir()] == ["tiny.yaml"]


def test_an_expanded_layer_is_not_expanded_again(command: Command, models: dict[str, Path]):
    arguments = ("--layers=[1]", "--init=inherit", "--way=expand")
    assert command("statex", "--checkpoint", str(models["GLA"]), "--output=first", *arguments).code == 0
    done = command("statex", "--checkpoint=first", "--output=second", *arguments).refused()
    assert done.err.strip().endswith("layers: layer 1 cannot grow, since it is an expanded GLA already")


def test_states_that_grow_with_the_length_are_not_counted(command: Command, tmp_path: Path):
    softmax = "model.stack.third={class_path: SoftmaxAttention}"
    folder = exported(tmp_path / "hybrid", "hybrid", softmax)
    done = command("statex", "--checkpoint", str(folder), "--layers=1", "--output=larger")
    assert done.code == 0, done.err
    before, after, ratio = (line.replace("│", " ").split() for line in done.out.splitlines()[3:6])
    assert (before[0], after[0], ratio[0]) == ("before", "after", "ratio")
    then, now = (int(line[2].replace(",", "")) for line in (before, after))
    assert 0 < then < now
    assert ratio[2] == f"{now / then:.3f}"
