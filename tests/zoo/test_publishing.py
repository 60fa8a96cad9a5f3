"""`publish`, to a stand-in for the Hub through the Hub's own client."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi, constants

import zoo
from tests.commands import Command
from tests.hub_server import Hub
from tests.zoo.saved.public.public_folder import write
from zoo.publishing import publish

pytest_plugins = "tests.desk"
REPO = "ada/small-gla"


@pytest.fixture
def folder(desk: Path) -> Path:
    """A folder in the layout of others, with its card."""
    zoo.convert(write(desk / "theirs"), desk / "ours")
    return zoo.convert(desk / "ours", desk / "back", to="fla")


def test_a_folder_is_uploaded_and_comes_back(hub: Hub, folder: Path):
    published = publish(folder, REPO)
    assert published.url == f"{hub.url}/{REPO}/commit/new"
    files = hub.repos[REPO][-1]
    assert set(files) - {".gitattributes"} == set(published.files) == {path.name for path in folder.iterdir()}
    for path in folder.iterdir():
        assert path.name == "README.md" or files[path.name] == path.read_bytes()
    assert f'from_pretrained("{REPO}")' in files["README.md"].decode()
    tokens = torch.arange(9)[None]
    assert torch.equal(zoo.load(f"hf://{REPO}")(tokens)[0], zoo.load(folder)(tokens)[0])


@pytest.mark.slow
def test_a_run_with_its_evaluation(hub: Hub, command: Command, finished: Path, desk: Path):
    shutil.copytree(finished / "runs", desk / "runs")
    zoo.evaluate("runs/done", "passkey", lengths=64, samples=2, output="measured", device="cpu", verbose=False)
    done = command("publish", "runs/done", "--repo=engines/done", "--evaluation=measured", "--private")
    assert done.code == 0, done.err
    assert 'zoo.load("hf://engines/done")' in done.out
    files = hub.repos["engines/done"][-1]
    names = {"config.yaml", "model.safetensors", "tokenizer.json", "hashes.json", "README.md", "evaluation.jsonl"}
    assert set(files) - {".gitattributes"} == names
    assert hub.private["engines/done"]
    card, record = files["README.md"].decode(), json.loads(files["evaluation.jsonl"])
    assert re.search(r"^\| passkey \| length 64.* \| accuracy \| [\d.e-]+ \|$", card, re.MULTILINE)
    assert "library_name: token-mixer-zoo" in card
    assert 'zoo.load("hf://engines/done")' in card
    assert str(desk) not in files["evaluation.jsonl"].decode()
    assert record["task"] == "passkey"
    expected = dict(zoo.load("runs/done").named_parameters())
    for name, parameter in zoo.load("hf://engines/done").named_parameters():
        assert torch.equal(parameter, expected[name])


def test_a_dry_run_uploads_nothing(hub: Hub, command: Command, folder: Path):
    before = {path.name: path.stat().st_size for path in folder.iterdir()}
    done = command("publish", "back", f"--repo={REPO}", "--dry-run")
    assert done.code == 0, done.err
    assert hub.requests == []
    listed = dict(reversed(pair) for pair in re.findall(r"^ *([\d,]+) bytes  (\S+)$", done.out, re.MULTILINE))
    sizes = {name: int(size.replace(",", "")) for name, size in listed.items()}
    assert {**sizes, "README.md": 0} == {**before, "README.md": 0}
    assert f'from_pretrained("{REPO}")' in done.out  # the card
    assert re.search(r"README.md has \d+ places to be filled in", done.out)
    assert publish(folder, REPO).files == sizes


def test_a_public_folder_of_others_needs_a_card(hub: Hub, desk: Path):
    with pytest.raises(zoo.UserError, match=r"theirs has no README.md"):
        publish(write(desk / "theirs"), REPO)


Change = Callable[[Path], object]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / ".env").write_text("KEY=1"), r"\.env is not a file of a model, so nothing is published"),
        (lambda f: (f / "notes.txt").write_text("mine"), r"notes.txt is not a file of a model"),
        (lambda f: (f / "pytorch_model.bin").write_bytes(b""), r"pytorch_model.bin is not a file of a model"),
        (lambda f: (f / "checkpoints").mkdir(), r"checkpoints is a link or a folder"),
        (lambda f: (f / "LICENSE").symlink_to("/etc/passwd"), r"LICENSE is a link or a folder"),
        (lambda f: (f / "README.md").write_text("my key: hf_" + "a" * 34), r"README.md has what looks like a secret"),
        (lambda f: (f / "config.json").write_text("{}"), r"model_type null"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\0" * 64), r"model.safetensors"),
    ],
)
def test_folders_that_are_not_published(change: Change, message: str, hub: Hub, folder: Path):
    change(folder)
    for dry_run in (True, False):
        with pytest.raises(zoo.UserError, match=message):
            publish(folder, REPO, dry_run=dry_run)
    assert hub.requests == []


def test_evaluations_of_another_model(hub: Hub, folder: Path, desk: Path):
    with pytest.raises(zoo.UserError, match=r"^evaluation: nowhere/rows.jsonl cannot be read \(No such file"):
        publish(folder, REPO, evaluation="nowhere")
    (desk / "measured").mkdir()
    what = {"task": "passkey", "cell": {}}
    line = {"what": what, "checkpoint": "other", "checkpoint_xxh3_128": "0", "rows": [{"metric": "acc", "value": 1}]}
    (desk / "measured" / "rows.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(zoo.UserError, match=r"^evaluation: .*rows.jsonl has no rows of this model"):
        publish(folder, REPO, evaluation="measured")


def test_names_tokens_and_owners(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with pytest.raises(zoo.UserError, match=r"^repo: 'small' must be owner/name"):
        publish(folder, "small")
    with pytest.raises(zoo.UserError, match=r"^repo: bob is neither you nor .* of yours \(ada, engines\)$"):
        publish(folder, "bob/small")
    monkeypatch.setenv("HF_TOKEN", "expired")
    with pytest.raises(zoo.UserError, match=r"^repo: .*(Invalid|invalid)"):
        publish(folder, REPO)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(zoo.UserError, match=r"^repo: a token for http.* is missing; log in by `hf auth login`"):
        publish(folder, REPO)
    monkeypatch.setenv("HF_TOKEN", "any")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(zoo.UserError, match=r"^repo: http://127.0.0.1:9 cannot be reached"):
        publish(folder, REPO)
    assert hub.repos == {}


def test_a_repository_that_exists(hub: Hub, folder: Path, desk: Path):
    older = zoo.convert(folder, desk / "older", to="fla", max_shard_size=50_000)
    (older / "picture.png").write_bytes(b"mine")
    hub.add(REPO, older)
    with pytest.raises(zoo.UserError, match=r"exists and holds \d+ files; .* overwrite=True"):
        publish(folder, REPO)
    assert len(hub.repos[REPO]) == 1
    publish(folder, REPO, overwrite=True)
    # the shards of the model before are gone, which would otherwise be files of both
    assert set(hub.repos[REPO][-1]) == {"picture.png", *(path.name for path in folder.iterdir())}
    with pytest.raises(zoo.UserError, match=r"exists and is public"):
        publish(folder, REPO, overwrite=True, private=True)


@pytest.mark.parametrize("broken", ["/lfs/", "/commit/"])
def test_a_failed_upload_says_what_is_there(
    broken: str, hub: Hub, folder: Path, desk: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # between attempts
    hub.broken = broken
    with pytest.raises(zoo.UserError, match=rf"^repo: .*; {REPO} was created and holds no file of the model$"):
        publish(folder, REPO)
    hub.broken = ""
    publish(folder, REPO)  # into the empty one
    hub.broken = broken
    with pytest.raises(zoo.UserError, match=rf"; {REPO} holds the \d files that it held before, and no new one$"):
        publish(zoo.convert(write(desk / "b", num_heads=2), desk / "c") and folder, REPO, overwrite=True)


def test_an_interrupted_upload_says_what_is_there(
    hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(HfApi, "create_commit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        publish(folder, REPO)
    assert f"interrupted: {REPO} was created and holds no file of the model." in caplog.text


@pytest.mark.slow
def test_a_folder_with_its_code(hub: Hub, folder: Path, desk: Path):
    own = zoo.convert(desk / "ours", desk / "own", to="transformers")
    published = publish(own, REPO)
    assert "modeling_token_mixer_zoo.py" in published.files
    assert f'from_pretrained("{REPO}", trust_remote_code=True)' in published.card
