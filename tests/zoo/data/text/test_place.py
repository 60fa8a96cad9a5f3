"""Shards in a folder of one's own or behind a URL, and tokenising that was interrupted."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import cli
from kernels.errors import UserError
from tests.forked_python import forked_python
from zoo.data import Corpus, Shards, TextData, Tokenizer, prepare
from zoo.data.text.place import Place

FEW = 500  # tokens of a file


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many files, many bundles of text, and progress that is written after each of them."""
    monkeypatch.setattr("zoo.data.text.progress.SHARD_TOKENS", FEW)
    monkeypatch.setattr("zoo.data.text.encoding.PIECE_CHARACTERS", 800)
    monkeypatch.setattr("zoo.data.text.progress.SAVED_EVERY", 0.0)


@pytest.fixture(params=["cache", "folder", "URL"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    """Where the shards are to lie."""
    return {"cache": None, "folder": str(tmp_path / "own"), "URL": f"file://{tmp_path}/bucket/tokens/"}[request.param]


def content(folder: Path | str) -> dict[str, bytes]:
    """Name → bytes of every file of a folder of shards."""
    path = Path(str(folder).removeprefix("file://"))
    return {file.name: file.read_bytes() for file in path.iterdir()}


def interrupted(monkeypatch: pytest.MonkeyPatch, name: str, call: int) -> None:
    """Ctrl-C instead of some call of a function."""
    module, _, attribute = name.rpartition(":")
    owner: Any = sys.modules[module] if "." not in attribute else vars(sys.modules[module])[attribute.split(".")[0]]
    original, calls = getattr(owner, attribute.rpartition(".")[2]), []

    def function(*given: Any, **named: Any) -> Any:
        calls.append(given)
        if len(calls) == call:
            raise KeyboardInterrupt
        return original(*given, **named)

    monkeypatch.setattr(owner, attribute.rpartition(".")[2], function)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Writer.append", "AppendedFile.close", "Place.put"])
def test_it_goes_on_wherever_it_was_interrupted(
    name: str,
    where: str | None,
    text_folder: str,
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """When something is written, when a file is full, when it is sent; again and again, to the same bytes."""
    corpus, folder, attempts = Corpus(text_folder), None, 0
    whole = content(prepare(corpus, tokenizer, 0.2, 1, str(tmp_path / "whole")))
    while folder is None:
        with monkeypatch.context() as patch:
            interrupted(patch, f"zoo.data.text.progress:{name}", call=attempts + (7 if name == "Writer.append" else 1))
            with contextlib.suppress(KeyboardInterrupt):
                folder = prepare(corpus, tokenizer, 0.2, 1, where)
        attempts += 1
    sent = where is not None and "://" in where
    assert attempts > 2 if sent or name != "Place.put" else attempts == 1
    assert content(folder) == whole
    assert len(Shards(folder, "train").manifest["splits"]["train"]["shards"]) > 3


def test_what_was_tokenised_is_not_tokenised_again(
    where: str | None, text_folder: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
):
    corpus, encoded = Corpus(text_folder), []
    encode = Tokenizer.encode_batch
    monkeypatch.setattr(Tokenizer, "encode_batch", lambda self, texts: encoded.extend(texts) or encode(self, texts))
    with monkeypatch.context() as patch:
        interrupted(patch, "zoo.data.text.progress:Writer.append", call=50)
        with pytest.raises(KeyboardInterrupt):
            prepare(corpus, tokenizer, 0.2, 1, where)
    first = len(encoded)
    assert first > 15
    prepare(corpus, tokenizer, 0.2, 1, where)
    assert 40 <= len(encoded) < 40 + 10
    assert len(encoded) - first < 30


@pytest.mark.slow
def test_a_killed_process_is_continued_by_one_of_two(
    text_folder: str, tokenizer: Tokenizer, cache: Path, tmp_path: Path
):
    """kill -9 in the middle; two others that go on at once have the shards of a process that nobody killed."""
    program = """
import os, signal, sys, zoo.data.text.encoding, zoo.data.text.progress as progress
from zoo.data import Corpus, prepare, train_tokenizer
progress.SHARD_TOKENS, progress.SAVED_EVERY, zoo.data.text.encoding.PIECE_CHARACTERS = 500, 0.0, 800
append, calls = progress.Writer.append, []
def counted(self, *tokens):
    calls.append(1)
    if len(calls) == 50 and sys.argv[2] == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    append(self, *tokens)
progress.Writer.append = counted
prepare(Corpus(sys.argv[1]), train_tokenizer(Corpus(sys.argv[1]), 300), 0.2, 2)
sys.stdout.write(str(len(calls)))
"""

    (tmp_path / "program.py").write_text(program)

    def start(how: str) -> "subprocess.Popen[str]":
        command = [forked_python(), str(tmp_path / "program.py"), text_folder, how]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    assert start("dies").wait(timeout=240) == -signal.SIGKILL
    (partial,) = (cache / "shards").glob(".*.partial")
    assert json.loads((partial / "progress.json").read_text())["pieces"] > 10
    two = [start("goes on") for _ in range(2)]
    written = sorted(int(process.communicate(timeout=240)[0]) for process in two)
    assert written[0] == 0  # it waited for the other one
    assert 20 < written[1] < 70  # which did not write all 80 again
    found = content(prepare(Corpus(text_folder), tokenizer, 0.2, 1))
    shutil.rmtree(cache / "shards")
    assert found == content(prepare(Corpus(text_folder), tokenizer, 0.2, 1))


@pytest.mark.slow
def test_ctrl_c_while_tokenising_ends_a_run(
    text_folder: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Nothing that is done at the end of a run tokenises the rest."""
    monkeypatch.chdir(tmp_path)
    interrupted(monkeypatch, "zoo.data.text.progress:Writer.append", call=50)
    small = ("--data.vocab_size=300", "--data.preprocessing_workers=1", "--trainer.accelerator=cpu")
    with pytest.raises(KeyboardInterrupt):
        cli.run(["fit", "--config", "gdn_h2.yaml", f"--data.path={text_folder}", *small, "--run", "a"])
    assert "tokenising was interrupted; the next run continues it" in caplog.text
    assert [folder.suffix for folder in (cache / "shards").iterdir() if folder.is_dir()] == [".partial"]


def test_progress_with_another_text_is_not_used(
    text_folder: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
):
    """A file whose size and time of change are the same as before."""
    first = Path(text_folder) / "00.txt"
    with monkeypatch.context() as patch:
        interrupted(patch, "zoo.data.text.progress:Writer.append", call=50)
        with pytest.raises(KeyboardInterrupt):
            prepare(Corpus(text_folder), tokenizer, 0.2, 1)
    times = first.stat().st_atime_ns, first.stat().st_mtime_ns
    first.write_text(first.read_text().replace("document 0", "documenT 0"))
    os.utime(first, ns=times)
    shards = Shards(prepare(Corpus(text_folder), tokenizer, 0.2, 1), "train")
    both = [shards, Shards(shards.folder, "validation")]
    assert sum("documenT 0" in tokenizer.decode(s.read(0, len(s)).tolist()) for s in both) == 1


@pytest.fixture
def arguments(text_folder: str) -> dict[str, Any]:
    return {"path": text_folder, "vocab_size": 300, "sequence_length": 16, "batch_size": 4, "num_workers": 0}


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["windows", "documents"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_from_behind_a_url_are_those_of_a_folder(
    packing: str, num_workers: int, arguments: dict[str, Any], tmp_path: Path
):
    def batches(**more: Any) -> Iterator[torch.Tensor]:
        data = TextData(**(arguments | {"packing": packing, "num_workers": num_workers} | more))
        for batch in data.val_dataloader():
            yield from (batch.tokens, batch.labels, *([] if batch.cu_seqlens is None else [batch.cu_seqlens]))
        for _, batch in zip(range(5), data.train_dataloader(), strict=False):
            yield batch.tokens

    local, remote = list(batches()), list(batches(shards=f"file://{tmp_path}/bucket"))
    assert len(local) == len(remote) > 6
    assert all(torch.equal(a, b) for a, b in zip(local, remote, strict=True))


def test_shards_behind_a_url_are_prepared_once_for_all_machines(
    arguments: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first = TextData(**arguments, shards="memory://bucket/tokens").train.shards
    assert str(first.folder).startswith("memory://bucket/tokens/")
    kept = [file.name for file in (tmp_path / "cache" / "shards").rglob("*.bin")]
    assert sorted(kept) == ["train.starts.bin", "validation.starts.bin"]  # no room is taken but for these
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "another machine"))
    monkeypatch.setattr("zoo.data.text.shards._build", None)
    again = TextData(**arguments, shards="memory://bucket/tokens/").train.shards
    assert again.read(3, 2300).tolist() == first.read(3, 2300).tolist()
    assert again.document_starts.tolist() == first.document_starts.tolist()
    assert again.data_hash == first.data_hash


@pytest.mark.parametrize(("how", "said"), [("cut", r"has \d+ bytes, its manifest says"), ("gone", "is missing")])
def test_damage_behind_a_url_is_named(how: str, said: str, text_folder: str, tokenizer: Tokenizer, tmp_path: Path):
    url = prepare(Corpus(text_folder), tokenizer, 0.2, 1, f"file://{tmp_path}/bucket")
    file = Path(str(url).removeprefix("file://")) / "train-00001.bin"
    if how == "cut":
        os.truncate(file, 100)
    else:
        file.unlink()
    with pytest.raises(UserError, match=rf"the shard {url}/train-00001\.bin {said}"):
        Shards(url, "train")


@pytest.mark.parametrize("copied", [True, False])
def test_altered_starts_behind_a_url_are_found(
    copied: bool, text_folder: str, tokenizer: Tokenizer, tmp_path: Path, cache: Path
):
    """In the copy that is kept here, and where that was made from."""
    url = prepare(Corpus(text_folder), tokenizer, 0.2, 1, f"file://{tmp_path}/bucket")
    (own,) = (folder for folder in (cache / "shards").iterdir() if folder.is_dir())
    if not copied:
        shutil.rmtree(own)
    folder = own if copied else Path(str(url).removeprefix("file://"))
    file = folder / "train.starts.bin"
    file.write_bytes(file.read_bytes()[:-8] + b"\1" * 8)
    where = folder if copied else url
    with pytest.raises(UserError, match=rf"the shard {where}/train\.starts\.bin was altered: .*; delete {where} to"):
        len(Shards(url, "train").document_starts)


def test_altered_content_behind_a_url_is_found_on_request(text_folder: str, tokenizer: Tokenizer, tmp_path: Path):
    url = prepare(Corpus(text_folder), tokenizer, 0.2, 1, f"file://{tmp_path}/bucket")
    file = Path(str(url).removeprefix("file://")) / "train-00001.bin"
    changed = bytearray(file.read_bytes())
    changed[100] ^= 4
    file.write_bytes(changed)
    Shards(url, "train")
    with pytest.raises(UserError, match=r"train-00001\.bin was altered"):
        Shards(url, "train", verify=True)


@pytest.mark.parametrize(
    ("shards", "said"),
    [
        ("s4://bucket", r"data.shards: s4://bucket/\w+ cannot be listed \(Protocol not known: s4\)"),
        ("memory-typo://bucket", r"data.shards: memory-typo://bucket/\w+ cannot be listed \(Protocol not known"),
        ("/proc/nowhere", r"the folder /proc/nowhere cannot be written .*; set data.shards to a folder that can"),
    ],
)
def test_a_place_that_cannot_be_used(shards: str, said: str, arguments: dict[str, Any]):
    with pytest.raises(UserError, match=said):
        TextData(**arguments, shards=shards).setup()


def test_files_may_be_links(tmp_path: Path, text_folder: str, tokenizer: Tokenizer):
    """Such as on a larger disk."""
    folder = Path(prepare(Corpus(text_folder), tokenizer, 0.2, 1))
    whole = Shards(folder, "train").read(0, 2 * FEW).tolist()
    moved = (folder / "train-00001.bin").rename(tmp_path / "elsewhere.bin")
    (folder / "train-00001.bin").symlink_to(moved)
    assert Shards(folder, "train").read(0, 2 * FEW).tolist() == whole


def test_a_file_that_goes_while_it_is_read_is_named(tmp_path: Path, text_folder: str, tokenizer: Tokenizer):
    url = prepare(Corpus(text_folder), tokenizer, 0.2, 1, f"file://{tmp_path}/bucket")
    shards = Shards(url, "train")
    Path(str(url).removeprefix("file://"), "train-00001.bin").unlink()
    with pytest.raises(UserError, match=r"data\.shards: .*train-00001\.bin cannot be read"):
        shards.read(FEW, FEW + 10)
    assert len(shards.read(0, 10)) == 10
    assert Place(str(url)).sizes()["train-00000.bin"] == 2 * FEW
