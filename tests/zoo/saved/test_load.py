from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import cli
import zoo
from kernels import UserError
from tests.commands import sitting_at


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose data and cache are gone: what was saved must be enough."""
    folder = tmp_path_factory.mktemp("desk")
    texts = folder / "texts.jsonl"
    texts.write_text("".join(f'{{"text": "text {i}, and {i * i} words; ü"}}\n' for i in range(400)))
    with sitting_at(folder, folder / "cache"):
        command = ["fit", "--config", "gdn_h2.yaml", "--config", "tiny.yaml", "--run", "small", "--trainer.max_steps=2"]
        assert cli.run([*command, "--data.path=texts.jsonl", "--data.vocab_size=300"]) == 0
    texts.unlink()
    (folder / "cache").rename(folder / "gone")
    return folder / "runs" / "small"


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "never made"))


@pytest.fixture
def saved(run: Path) -> dict[str, torch.Tensor]:
    """The weights in the run's checkpoint, by the model's names."""
    contents = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    return {name.removeprefix("model."): tensor for name, tensor in contents.items()}


@pytest.fixture
def exported(run: Path, tmp_path: Path, saved: dict[str, torch.Tensor]) -> Path:
    """A folder as one would publish it."""
    folder = tmp_path / "exported"
    folder.mkdir()
    save_file(saved, folder / "model.safetensors")
    for name in ("config.yaml", "tokenizer.json"):
        (folder / name).write_bytes((run / name).read_bytes())
    return folder


@pytest.mark.slow
def test_load_takes_a_run_a_file_and_an_exported_folder(run: Path, exported: Path, saved: dict[str, torch.Tensor]):
    for path in (run, str(run), run / "checkpoints" / "last.ckpt", run / "checkpoints", exported):
        model = zoo.load(path)
        assert not model.training
        assert model.hidden_size == 32
        assert model.state_dict().keys() == saved.keys()
        assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())


@pytest.mark.slow
def test_load_takes_a_device(run: Path):
    assert {parameter.device.type for parameter in zoo.load(run, device="meta").parameters()} == {"meta"}
    for device in ("tpu", "cuda:99"):
        with pytest.raises(UserError, match=f"device: {device} cannot be used here"):
            zoo.load(run, device=device)


def test_load_tokenizer(run: Path, exported: Path):
    for path in (run, run / "checkpoints" / "last.ckpt", exported):
        tokenizer = zoo.load_tokenizer(path)
        assert tokenizer.vocab_size == 300
        assert tokenizer.decode(tokenizer.encode("text 7 ü 🐁")) == "text 7 ü 🐁"


@pytest.mark.slow
def test_build_takes_the_vocabulary_of_the_data(tmp_path: Path, run: Path):
    tokenizer, small = f"data.tokenizer={run / 'tokenizer.json'}", ("model.hidden_size=32", "model.num_heads=2")
    assert zoo.build("gdn_h2.yaml", tokenizer, *small).vocab_size == 300  # null: the tokenizer's
    assert zoo.build("gdn_h2.yaml", tokenizer, *small, "model.vocab_size=512").vocab_size == 512  # a number stays


@pytest.mark.parametrize("load", [zoo.load, zoo.load_tokenizer])
def test_what_holds_no_model_is_named(load, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "cut.ckpt").write_bytes((run / "checkpoints" / "last.ckpt").read_bytes()[:5000])
    torch.save({"state_dict": {}}, tmp_path / "foreign.ckpt")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(run.parent.parent)
    for path, message in {
        tmp_path / "cut.ckpt": "cut.ckpt is truncated or not a checkpoint of this project",
        tmp_path / "foreign.ckpt": "foreign.ckpt is not a checkpoint of this project",
        tmp_path / "empty": r"empty holds no checkpoints/last.ckpt",
        tmp_path / "none": "there is nothing at .*none",
        "runs/smal": "there is nothing at runs/smal; did you mean 'small'?",
        "small": "there is nothing at small; did you mean runs/small",
    }.items():
        with pytest.raises(UserError, match=message):
            load(path)


def test_an_exported_folder_must_be_complete_and_fit(exported: Path, saved: dict[str, torch.Tensor]):
    save_file({name: tensor for name, tensor in saved.items() if name != "norm.weight"}, exported / "model.safetensors")
    with pytest.raises(UserError, match=r"model.safetensors does not fit the model: it lacks 1 .* norm.weight"):
        zoo.load(exported)
    (exported / "config.yaml").unlink()
    with pytest.raises(UserError, match=r"config.yaml is missing"):
        zoo.load(exported)
