"""Models at `hf://`: what is downloaded, from a stand-in for the Hub, and that it is vetted like a local folder."""

import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

import zoo
from tests.hub_server import Hub
from tests.zoo.saved.public.public_folder import write

NEEDED = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def test_only_the_needed_files_are_downloaded(hub: Hub, tmp_path: Path):
    folder = write(tmp_path / "theirs")
    (folder / "modeling_evil.py").write_text("raise SystemExit('run')")
    for name in ("pytorch_model.bin", "consolidated.safetensors", "README.md"):
        (folder / name).write_bytes(b"\0" * 10)
    hub.add("ada/gla", folder)
    model, local = zoo.load("hf://ada/gla"), zoo.load(folder)
    assert hub.downloads() == NEEDED
    tokens = torch.arange(9)[None]
    assert torch.equal(model(tokens)[0], local(tokens)[0])
    assert zoo.load_tokenizer("hf://ada/gla").to_json() == zoo.load_tokenizer(folder).to_json()


def test_a_revision_in_shards_and_a_model_in_our_format(hub: Hub, tmp_path: Path):
    hub.add("ada/gla", write(tmp_path / "first", shards=3))
    hub.add("ada/gla", zoo.convert(write(tmp_path / "second"), tmp_path / "ours"))
    first, second = zoo.load("hf://ada/gla@v1"), zoo.load("hf://ada/gla")
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert {"config.yaml", "hashes.json", "model-00001-of-00003.safetensors"} <= hub.downloads()


def test_verbs_take_it(hub: Hub, desk: Path):
    hub.add("ada/gla", write(desk / "theirs"))
    zoo.convert("hf://ada/gla", "ours")
    zoo.convert(Path("hf://ada/gla"), "back", to="fla")  # a Path has one slash less
    assert "hello" in zoo.generate("hf://ada/gla", "hello", max_new_tokens=2, device="cpu")
    assert zoo.statex("hf://ada/gla", "larger", layers=1).folder.is_dir()
    rows = zoo.evaluate("hf://ada/gla", "passkey", lengths=128, samples=1, device="cpu", verbose=False)
    assert rows[0]["model"] == "gla"
    with pytest.raises(zoo.UserError, match=r"optim\.initial_weights: hf://ada/gla is not a local folder"):
        zoo.fit("gla.yaml", "optim.initial_weights=hf://ada/gla")


def test_without_a_network_the_cache_serves(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hub.add("ada/gla", write(tmp_path / "theirs"))
    hub.add("ada/other", tmp_path / "theirs")
    zoo.load("hf://ada/gla")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # where nothing listens
    zoo.load("hf://ada/gla")
    with pytest.raises(zoo.UserError, match=r"127.0.0.1:9 cannot be reached, and the cache .* all of hf://ada/other$"):
        zoo.load("hf://ada/other")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("hf://ada", "must be hf://owner/name or hf://owner/name@revision"),
        ("hf://ada/gla/model.safetensors", "must be hf://owner/name"),
        ("hf://ada/gla@../../../main", "must be hf://owner/name or hf://owner/name@revision"),
        ("hf://ada/gla@refs/../../x", "must be hf://owner/name or hf://owner/name@revision"),
        ("hf://ada/gla@/tmp/x", "must be hf://owner/name or hf://owner/name@revision"),
        ("hf://ada/no..name", "cannot be the name of a repository"),
        ("hf://ada/none", "the repository ada/none does not exist at http"),
        ("hf://ada/gla@v7", "ada/gla has no branch, tag or commit 'v7'"),
        ("hf://ada/empty", "holds no model: neither config.json nor config.yaml"),
        ("hf://ada/pickles", "pytorch_model.bin is refused, as only tensors are unpickled"),
        ("hf://ada/shards", "is incomplete: model-00002-of-00003.safetensors, .* is missing"),
        ("hf://ada/outside", "is not a .safetensors file in its folder"),
        ("hf://ada/foreign", "was not written by you, and its model.stack names 'os.system'"),
    ],
)
def test_refusals(path: str, message: str, hub: Hub, tmp_path: Path):
    hub.add("ada/gla", write(tmp_path / "gla"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "README.md").write_text("nothing")
    hub.add("ada/empty", tmp_path / "empty")
    pickles = write(tmp_path / "pickles")
    (pickles / "model.safetensors").rename(pickles / "pytorch_model.bin")
    hub.add("ada/pickles", pickles)
    shards = write(tmp_path / "shards", shards=3)
    (shards / "model-00002-of-00003.safetensors").unlink()
    hub.add("ada/shards", shards)
    index = shards / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00002", "../model-00002"))
    hub.add("ada/outside", shards)
    foreign = zoo.convert(tmp_path / "gla", tmp_path / "foreign")
    (foreign / "hashes.json").unlink()
    (foreign / "config.yaml").write_text("model: {stack: {class_path: os.system, init_args: {command: id}}}")
    hub.add("ada/foreign", foreign)
    with pytest.raises(zoo.UserError, match=message):
        zoo.load(path)


def test_a_gap_in_the_cache_is_filled(hub: Hub, tmp_path: Path):
    hub.add("ada/gla", write(tmp_path / "theirs"))
    zoo.load("hf://ada/gla")
    shutil.rmtree(tmp_path / "hub" / "models--ada--gla" / "blobs")
    zoo.load("hf://ada/gla")


def test_the_hub_fails(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # between attempts
    hub.add("ada/gla", write(tmp_path / "theirs"))
    hub.broken = "/resolve/"
    with pytest.raises(zoo.UserError, match=r"^checkpoint: "):
        zoo.load("hf://ada/gla")
