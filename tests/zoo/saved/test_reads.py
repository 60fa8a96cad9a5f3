"""Each file of a saved model is opened, hashed and read once."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
import xxhash

import zoo
from zoo.checkpoints.archive import read_seal, save_sealed
from zoo.checkpoints.format import read_weights
from zoo.evaluation.loaded import load_subject
from zoo.saved.model import SavedModel

from .public.public_folder import write


class Reads:
    """Files that were opened, and read by `torch.load` or mapped, by name; and the number of bytes that were hashed."""

    def __init__(self) -> None:
        self.opened, self.read = Counter[str](), Counter[str]()
        self.hashed_bytes = 0


_COUNTING: list[tuple[Path, Reads]] = []


def _count_openings(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _COUNTING and arguments[1] is not None:  # `os.open` has no mode; `open` calls it as well
        folder, reads = _COUNTING[-1]
        if isinstance(arguments[0], str) and Path(arguments[0]).parent.is_relative_to(folder):
            reads.opened[Path(arguments[0]).name] += 1


sys.addaudithook(_count_openings)


@contextmanager
def counted(folder: Path) -> Iterator[Reads]:
    """Count what happens to the files in a folder."""
    reads, load, safe_open, xxh3 = Reads(), torch.load, safetensors.safe_open, xxhash.xxh3_128

    class Hash:
        def __init__(self, content: bytes = b"", of: Any = None) -> None:
            self._hash = xxh3(content) if of is None else of
            reads.hashed_bytes += len(content)
            self.hexdigest = self._hash.hexdigest

        def update(self, content: bytes) -> None:
            reads.hashed_bytes += len(content)
            self._hash.update(content)

        def copy(self) -> "Hash":
            return Hash(of=self._hash.copy())

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, *args: Any, **options: Any) -> Any:
            reads.read[Path(getattr(file, "name", file)).name] += 1
            return function(file, *args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "load", noted(load))
        patch.setattr(safetensors, "safe_open", noted(safe_open))
        patch.setattr(xxhash, "xxh3_128", Hash)
        _COUNTING.append((folder, reads))
        try:
            yield reads
        finally:
            _COUNTING.pop()


ACTIONS: dict[str, Callable[[Path, Path], object]] = {
    "load": lambda path, output: zoo.load(path),
    "load_tokenizer": lambda path, output: zoo.load_tokenizer(path),
    "evaluate": lambda path, output: load_subject(path, "model", bf16=False),
    "generate": lambda path, output: zoo.generate(path, "a", max_new_tokens=1, device="cpu"),
    "export": zoo.export,
    "convert": zoo.convert,
    "convert to fla": lambda path, output: zoo.convert(path, output, to="fla"),
    "statex": lambda path, output: zoo.statex(path, output, layers=1),
}


SEAL = 64  # bytes at the end of a checkpoint, at most, which only one of its two hashes covers


def assert_read_once(reads: Reads, folder: Path, output: Path) -> None:
    sizes = {file.name: file.stat().st_size + SEAL for file in folder.rglob("*") if file.is_file()}
    written = sum(file.stat().st_size for file in output.iterdir()) if output.exists() else 0
    twice = {name: number for name, number in reads.opened.items() if number > 1}
    assert not twice
    assert all(number == 1 for number in reads.read.values()), reads.read
    assert reads.hashed_bytes <= sum(sizes[name] for name in reads.opened) + written


@pytest.mark.slow
@pytest.mark.parametrize("action", ["load", "load_tokenizer", "evaluate", "generate", "export", "statex"])
@pytest.mark.parametrize("kind", ["run", "checkpoint"])
def test_a_checkpoint_is_read_once(action: str, kind: str, finished: Path, tmp_path: Path):
    run = finished / "runs" / "done"
    path = run if kind == "run" else run / "checkpoints" / "last.ckpt"
    with counted(run) as reads:
        ACTIONS[action](path, tmp_path / "output")
    assert_read_once(reads, run, tmp_path / "output")
    if (action, kind) != ("load_tokenizer", "run"):  # whose folder has it as a file
        assert reads.opened["last.ckpt"] == reads.read["last.ckpt"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "action"),
    [
        *(("public", action) for action in ("load", "load_tokenizer", "evaluate", "generate", "convert")),
        *(("exported", action) for action in ("load", "load_tokenizer", "evaluate", "generate", "statex")),
        ("exported", "convert to fla"),
    ],
)
def test_a_folder_is_read_once(kind: str, action: str, tmp_path: Path):
    folder = write(tmp_path / "public")
    if kind == "exported":
        folder = zoo.convert(folder, tmp_path / "exported")
    with counted(folder) as reads:
        ACTIONS[action](folder, tmp_path / "output")
    assert_read_once(reads, folder, tmp_path / "output")
    if action != "load_tokenizer":
        assert reads.read["model.safetensors"] == 1


def test_a_checkpoint_that_is_replaced_after_its_hash_was_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The bytes that are loaded are those that were hashed."""
    file, other = tmp_path / "first.ckpt", tmp_path / "other.ckpt"
    for path, value in ((file, 1.0), (other, 2.0)):
        with open(path, "wb") as opened:
            save_sealed({"w": torch.full((3,), value)}, opened)

    def checked_and_replaced(*arguments: Any) -> tuple[bool, str]:
        result = read_seal(*arguments)
        other.replace(file)
        return result

    monkeypatch.setattr("zoo.checkpoints.format.read_seal", checked_and_replaced)
    assert torch.equal(read_weights(file)["w"], torch.full((3,), 1.0))


def test_files_of_a_folder_that_change_after_their_hashes_were_checked(tmp_path: Path):
    """The config and the tokenizer that are used are those that were hashed."""
    folder = zoo.convert(write(tmp_path / "public"), tmp_path / "exported")
    text = (folder / "tokenizer.json").read_text()
    saved = SavedModel.open(folder)
    assert saved.signature  # all files are checked
    (folder / "config.yaml").write_text("model: changed")
    (folder / "tokenizer.json").write_text("{}")
    assert saved.config["model"]["num_layers"] == 2
    assert saved.required_tokenizer.to_json() == text
