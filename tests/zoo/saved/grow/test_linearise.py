"""The verb `linearise`, and the training against a teacher that follows."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import zoo
from kernels import UserError
from tests.commands import Command
from zoo.checkpoints.tensor_files import TensorFiles, TensorsInMemory
from zoo.saved.exported_folder import CONFIG, write_folder

from .subjects import exported


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Exported folders; only to be read."""
    folder = tmp_path_factory.mktemp("models")
    return {name: exported(folder / name, name) for name in ("GLA", "transformer", "hybrid")}


@pytest.mark.parametrize(
    ("keep", "kept"),
    [("every:2", [1, 3]), ("every:4", [3]), ([0, 2], [0, 2]), ("[0, 2]", [0, 2]), ("1", [1]), ([], [])],
)
def test_layers_that_stay_and_weights_that_are_carried(
    keep: str | list[int], kept: list[int], models: dict[str, Path], tmp_path: Path
):
    done = zoo.linearise(models["transformer"], tmp_path / "student", mixer="GatedDeltaNet", keep=keep)
    assert (done.kept, done.layers) == (kept, [layer for layer in range(4) if layer not in kept])
    before, after = zoo.load(models["transformer"]).state_dict(), zoo.load(tmp_path / "student").state_dict()
    carried = {"in_proj.q.weight", "in_proj.k.weight", "in_proj.v.weight", "o_proj.weight"}
    assert {*done.carried} == carried
    assert done.left == []
    assert not carried & {*done.new}
    for name, tensor in after.items():
        *_, layer, part = name.split(".", 3)[:3] if name.startswith("layers.") else ("", "-1", "")
        if name in before:
            assert torch.equal(tensor, before[name]), name
        else:
            assert part == "mixer"
            assert name.split(".", 3)[3] in done.new
    assert done.loss == {}
    assert done.text == "not computed, as the model was saved without a tokenizer"


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["RetNet", "GLA", "Mamba2", "KDA", "HGRN2", "RWKV7", "GatedDeltaProduct"])
def test_any_mixer_with_a_matrix_state(mixer: str, models: dict[str, Path], tmp_path: Path):
    zoo.linearise(models["transformer"], tmp_path / "student", mixer=mixer, keep="every:2")
    model = zoo.load(tmp_path / "student")
    assert [type(each).__name__ for each in model.mixers] == [mixer, "SoftmaxAttention"] * 2
    assert model(torch.zeros(1, 3, dtype=torch.int64))[0].isfinite().all()


def test_a_mixer_with_arguments(models: dict[str, Path], tmp_path: Path):
    inner = {"class_path": "GatedDeltaNet", "init_args": {"allow_neg_eigval": True}}
    mixer = {"class_path": "mixers.Expanded", "init_args": {"factor": 2, "mixer": inner}}
    zoo.linearise(models["transformer"], tmp_path / "student", mixer=mixer, keep=[3])
    stack = yaml.safe_load((tmp_path / "student" / CONFIG).read_text())["model"]["stack"]["init_args"]
    assert stack["pattern"] == "BBBA"
    made = stack["mixers"]["B"]["init_args"]["mixer"]["init_args"]
    assert (made["num_heads"], made["head_dim"], made["allow_neg_eigval"]) == (2, 16, True)


@pytest.mark.parametrize("keep", ["every:2", []])
def test_the_layout_of_flash_linear_attention(keep: str | list[int], tmp_path: Path):
    """It has one eps for all norms, which most public models share with our mixers."""
    teacher = exported(tmp_path / "teacher", "transformer", "model.norm_eps=1e-5")
    student = zoo.linearise(teacher, tmp_path / "student", mixer="GatedDeltaNet", keep=keep).folder
    there = zoo.convert(student, tmp_path / "there", to="fla")
    tokens = torch.arange(40)[None]
    assert torch.equal(zoo.load(there)(tokens)[0], zoo.load(student)(tokens)[0])


def test_a_larger_state(models: dict[str, Path], tmp_path: Path):
    student = zoo.linearise(models["transformer"], tmp_path / "student", mixer="GatedDeltaNet", keep="every:2").folder
    zoo.statex(student, tmp_path / "larger", layers=2, init="preserve", way="expand")
    tokens = torch.arange(40)[None]
    torch.testing.assert_close(zoo.load(tmp_path / "larger")(tokens)[0], zoo.load(student)(tokens)[0])


def test_a_seed_gives_the_same_bits(models: dict[str, Path], tmp_path: Path):
    states = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        zoo.linearise(models["transformer"], tmp_path / name, "GatedDeltaNet", seed=seed)
        states.append(zoo.load(tmp_path / name).state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    new = "layers.0.mixer.in_proj.a.weight"
    assert not torch.equal(states[0][new], states[2][new])


def test_weights_keep_their_dtype(models: dict[str, Path], tmp_path: Path):
    full = models["transformer"]
    state = {name: tensor.bfloat16() for name, tensor in zoo.load(full).state_dict().items()}
    write_folder(tmp_path / "bf16", {CONFIG: (full / CONFIG).read_text()}, TensorsInMemory(state), hashed=True)
    zoo.linearise(tmp_path / "bf16", tmp_path / "student", "GatedDeltaNet")
    specs = TensorFiles(tmp_path / "student").specs
    assert specs["layers.0.mixer.in_proj.q.weight"].dtype == torch.bfloat16
    assert specs["layers.0.mixer.decay.A_log"].dtype == torch.float32
    assert specs["embeddings.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        ("transformer", {"mixer": "SoftmaxAttention"}, "mixer: SoftmaxAttention has no matrix state; choose one of"),
        ("transformer", {"mixer": "Mamba1"}, "mixer: Mamba1 has no matrix state"),
        ("transformer", {"mixer": "GatedDeltanet"}, "mixer: 'GatedDeltanet' is not registered; did you mean"),
        ("transformer", {"mixer": {}}, "mixer: {} has no class_path"),
        (
            "transformer",
            {"mixer": {"class_path": "GatedDeltaNet", "init_args": {"head_dim": 8}}},
            "mixer: its queries have 2 heads of 8, but those of SoftmaxAttention in layer 0 have 2 heads of 16",
        ),
        ("transformer", {"keep": "evry:2"}, "keep: 'evry:2' must be every:n, auto:n, or a list of layers"),
        ("transformer", {"keep": "every:1"}, "keep: every:1 must be from every:2 to every:"),
        ("transformer", {"keep": "every:99"}, "keep: every:99 must be from every:2 to every:"),
        ("transformer", {"keep": "auto:4"}, "keep: auto:4 must be from auto:1 to auto:3"),
        ("transformer", {"keep": "auto:2"}, "keep: auto:2 needs the loss on a text"),
        ("transformer", {"keep": [4]}, "keep: layer 4 does not exist; the model has the layers 0 to 3"),
        ("transformer", {"keep": [0, 1, 2, 3]}, "are all attention layers of the model"),
        ("hybrid", {"keep": [0]}, "keep: layer 0 is not attention; those layers are 2"),
        ("GLA", {}, "checkpoint: the model has no attention layers to replace; layer 0 is a GLA"),
        ("transformer", {"tokens": 0}, "tokens: 0 must be above 0"),
        ("missing", {}, "checkpoint: there is nothing at"),
    ],
)
def test_mistakes(model: str, arguments: dict[str, Any], message: str, models: dict[str, Path], tmp_path: Path):
    with pytest.raises(UserError) as error:
        zoo.linearise(
            models.get(model, tmp_path / model), tmp_path / "student", **{"mixer": "GatedDeltaNet", **arguments}
        )
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "student").exists()


@pytest.mark.slow
def test_losses_and_layers_by_their_loss(finished: Path, tmp_path: Path, command: Command, desk: Path):
    """A run of this desk is turned into a transformer first, as it has a tokenizer."""
    short = ("--config", "tiny.yaml", "--model.num_layers=3", "--trainer.max_steps=2")
    assert command("fit", "--config", "transformer.yaml", *short, "--run", "teacher").code == 0
    done = command(
        "linearise",
        "--checkpoint",
        "runs/teacher",
        "--mixer=GatedDeltaNet",
        "--keep=auto:1",
        "--tokens=64",
        "--output",
        "student",
    ).ok()
    assert "loss in nats per token: teacher" in done.out
    again = zoo.linearise("runs/teacher", "again", "GatedDeltaNet", keep="auto:1", tokens=64)
    assert {*again.alone} == {0, 1, 2}
    assert again.kept == [max(again.alone, key=again.alone.__getitem__)]
    assert again.loss.keys() == {"teacher", "untrained"}
    teacher = ("--teacher.checkpoint=runs/teacher", "--data.tokenizer=student/tokenizer.json")
    for stage, start in (("layers", "student"), ("logits", "runs/layers")):
        rest = (*short[:2], f"--config=train/distil_{stage}.yaml", f"--optim.initial_weights={start}", *teacher)
        command("fit", *rest, "--trainer.max_steps=2", "--run", stage).ok()
    before, after = zoo.load("student").state_dict(), zoo.load("runs/layers").state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    replaced = tuple(f"layers.{layer}.mixer." for layer in again.layers)
    assert moved
    assert all(name.startswith(replaced) for name in moved)
    done = command("fit", "--resume", "runs/layers", "--teacher.match=logits", "--trainer.max_steps=3").refused()
    assert "teacher.match: this run matches logits, but the checkpoint was trained to match layers" in done.err
    assert command("validate", "--checkpoint", "runs/logits").code == 0
