"""What verbs write replaces nothing, or with --overwrite what such a verb wrote."""

import itertools
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import zoo
from tests.commands import Command
from tests.zoo.saved.public.public_folder import write
from zoo.checkpoints.tensor_files import TensorsInMemory
from zoo.files.atomic import exchange_folders
from zoo.saved.exported_folder import write_folder

VERBS = {
    "export": ("--checkpoint=run",),
    "convert": ("--checkpoint=theirs",),
    "convert back": ("--checkpoint=ours", "--to=fla"),
    "statex": ("--checkpoint=ours", "--layers=1"),
    "linearise": ("--checkpoint=run", "--mixer=GLA", "--keep=[]", "--tokens=64"),
}
MINE = {
    "the folder of a run": "checkpoints/last.ckpt",
    "a folder that holds config.yaml": "config.yaml",
    "a folder that holds thesis.tex": "thesis.tex",
}


@pytest.fixture
def sources(finished: Path, desk: Path) -> Path:
    """A run, a public model and one of ours."""
    shutil.copytree(finished / "runs" / "done", desk / "run")
    zoo.convert(write(desk / "theirs"), desk / "ours")
    return desk


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_what_is_there_is_replaced_only_by_request(command: Command, sources: Path, verb: str):
    arguments = (verb.split()[0], *VERBS[verb], "--output=new")
    assert command(*arguments).code == 0
    before = files(sources)
    said = command(*arguments).sentence()
    assert "exists already and is a" in said
    assert "choose another, or replace it by --overwrite" in said
    assert files(sources) == before
    (sources / "new" / "notes.txt").write_text("mine")
    (sources / "new" / "model-00001-of-00002.safetensors").write_text("of an earlier model, in two files")
    assert command(*arguments, "--overwrite").code == 0
    assert {path.name for path in (sources / "new").iterdir()} == {
        *(name.removeprefix("new/") for name in before if name.startswith("new/")),
        "notes.txt",
    }
    zoo.load(sources / "new")


@pytest.mark.slow
@pytest.mark.parametrize("there", MINE)
@pytest.mark.parametrize("verb", ["export", "convert", "convert back", "statex", "linearise"])
def test_nothing_else_is_replaced(command: Command, sources: Path, verb: str, there: str):
    (sources / "new" / MINE[there]).parent.mkdir(parents=True)
    (sources / "new" / MINE[there]).write_text("mine")
    before = files(sources)
    done = command(verb.split()[0], *VERBS[verb], "--output=new", "--overwrite").refused()
    assert f"output: new exists already and is {there}, which is never replaced" in done.err
    assert files(sources) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("export", "--checkpoint=run", "--output=run"), "run exists already and is the folder of a run"),
        (("export", "--checkpoint=run", "--output=run/checkpoints"), "is the folder of a run"),
        (("export", "--checkpoint=run", "--output=theirs"), "theirs exists already and is a public model"),
        (("convert", "--checkpoint=ours", "--to=fla", "--output=ours"), "output: ours is the checkpoint that is read"),
        (("convert", "--checkpoint=theirs", "--output=theirs"), "output: theirs is the checkpoint that is read"),
        (("statex", "--checkpoint=ours", "--output=./ours"), "output: ours is the checkpoint that is read"),
        (("export", "--checkpoint=run", "--output=link"), "link exists already and is a link"),
    ],
)
def test_other_models_and_links(command: Command, sources: Path, arguments: tuple[str, ...], message: str):
    (sources / "link").symlink_to(sources / "ours")
    before = files(sources)
    done = command(*arguments, "--overwrite").refused()
    assert message in done.err
    assert files(sources) == before


@pytest.mark.slow
def test_nothing_of_the_old_model_is_left(command: Command, sources: Path):
    """A tokenizer next to weights that have none would be taken for theirs."""
    arguments = ("export", "--checkpoint=run", "--output=new")
    assert command(*arguments).code == 0
    (sources / "new" / "generation_config.json").write_text("{}")
    assert command(*arguments, "--overwrite").code == 0
    assert not (sources / "new" / "generation_config.json").exists()


def killed_at(event: int, write: Callable[[], None]) -> bool:
    """Run `write` in a process that ends before the n-th time it touches a file; return whether it ended there."""
    process = os.fork()
    if process == 0:
        events = itertools.count()
        kinds = ("open", "os.rename", "os.remove", "os.rmdir", "os.link", "os.mkdir", "ctypes.dlsym")
        sys.addaudithook(lambda kind, _: kind in kinds and next(events) == event and os.kill(os.getpid(), 9))
        write()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) != 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="folders are exchanged in one step")
def test_a_killed_replacement_leaves_the_old_model_or_the_new_one(tmp_path: Path):
    """Whenever it is killed, with all files of the user."""
    folder, old = tmp_path / "model", tmp_path / "old"
    folders = [old, tmp_path / "new"]
    for number, path in enumerate(folders):
        texts = {"config.yaml": f"model: {number}", **({"tokenizer.json": "{}"} if number == 0 else {})}
        write_folder(path, texts, TensorsInMemory({"x": torch.full((3,), float(number))}), hashed=True)
    models = [files(path) for path in folders]
    (old / "notes").mkdir()
    (old / "notes" / "today.md").write_text("mine")
    (old / "elsewhere").symlink_to("nowhere")

    def write() -> None:
        text = {"config.yaml": "model: 1"}
        write_folder(folder, text, TensorsInMemory({"x": torch.ones(3)}), hashed=True)

    left = []
    for event in range(1000):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(old, folder, symlinks=True)
        killed = killed_at(event, write)
        found = files(folder)
        assert found.pop("notes/today.md") == b"mine"
        assert os.readlink(folder / "elsewhere") == "nowhere"
        left.append(models.index(found))
        if not killed:
            break
    assert left[0] == 0
    assert left[-1] == 1
    assert left == sorted(left)


def test_folders_are_exchanged_where_one_step_is_not_possible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    monkeypatch.setattr(sys, "platform", "darwin")
    exchange_folders(tmp_path / "a", tmp_path / "b")
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == ["a", "a/b", "b", "b/a"]


@pytest.mark.slow
def test_an_edited_model_card_is_kept(command: Command, sources: Path):
    arguments = ("convert", "--checkpoint=ours", "--to=fla", "--output=new")
    assert command(*arguments).code == 0
    card = sources / "new" / "README.md"
    written = card.read_text(encoding="utf-8")
    for edited in ("mine", "mine again"):
        card.write_text(edited)
        assert command(*arguments, "--overwrite").code == 0
        assert card.read_text(encoding="utf-8") == written
    assert command(*arguments, "--overwrite").code == 0  # the same card needs no copy
    kept = {path.name: path.read_text() for path in card.parent.glob("README.*.md")}
    assert kept == {"README.old.md": "mine", "README.old2.md": "mine again"}
