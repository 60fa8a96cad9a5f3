"""Random damage to every kind of file that is kept between runs: one sentence, or nothing that matters has changed."""

import contextlib
import hashlib
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kernels.errors import UserError
from tests.zoo.data.text.test_place import interrupted
from zoo.data import Corpus, Shards, Tokenizer, prepare, train_tokenizer
from zoo.files.sealed_json import read_sealed, write_sealed


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several files, and progress that is written after each bundle of text."""
    monkeypatch.setattr("zoo.data.text.progress.SHARD_TOKENS", 500)
    monkeypatch.setattr("zoo.data.text.encoding.PIECE_CHARACTERS", 800)
    monkeypatch.setattr("zoo.data.text.progress.SAVED_EVERY", 0.0)
    monkeypatch.setattr("os.fsync", lambda descriptor: None)  # no power cut is among the damages


def damages(whole: bytes, draw: random.Random, rounds: int = 15) -> Iterator[bytes]:
    """Of a file: empty, cut, longer, other bits, other bytes; of JSON also without a key, and with other values."""
    yield b""
    yield whole + b"\0"
    for _ in range(rounds):
        yield whole[: draw.randrange(len(whole))]
        damaged = bytearray(whole)
        damaged[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        yield bytes(damaged)
        first = draw.randrange(len(whole))
        damaged[first : first + 20] = draw.randbytes(20)
        yield bytes(damaged)
        with contextlib.suppress(ValueError):
            content = json.loads(whole)
            inside: Any = content
            while draw.random() < 0.7 and (parts := [v for v in inside.values() if isinstance(v, dict) and v]):
                inside = draw.choice(parts)
            key = draw.choice(list(inside))
            inside[key] = draw.choice([None, 3, -1.5, "text", [], {}, True])
            if draw.random() < 0.5:
                del inside[key]
            yield json.dumps(content).encode()


def content(folder: Path | str) -> dict[str, str]:
    """What a reader of shards gets to see, and the seal of the rest."""
    found = {}
    for split in ("train", "validation"):
        shards = Shards(folder, split)
        seen = [shards.read(0, len(shards)), shards.document_starts, shards.data_hash, sorted(shards.manifest.items())]
        found[split] = hashlib.sha256(
            repr([str(s.tolist()) if hasattr(s, "tolist") else s for s in seen]).encode()
        ).hexdigest()
    return found


def test_shards(text_folder: str, tokenizer: Tokenizer):
    folder, draw = Path(prepare(Corpus(text_folder), tokenizer, 0.2, 1)), random.Random(1)
    right, told, same = content(folder), 0, 0
    for file in sorted(folder.iterdir()):
        whole = file.read_bytes()
        for damaged in damages(whole, draw):
            file.write_bytes(damaged)
            try:
                found = content(folder)
            except UserError as error:
                told += said_well(error, file)
            else:
                assert found == right, f"{file.name}: {damaged!r}"
                same += 1  # white space of the manifest
        file.write_bytes(whole)
    assert content(folder) == right
    assert told > 200
    assert same < 20


def test_an_old_manifest_without_a_seal(text_folder: str, tokenizer: Tokenizer):
    """No traceback; and the tokens and documents that are seen are the right ones."""
    folder, draw = Path(prepare(Corpus(text_folder), tokenizer, 0.2, 1)), random.Random(2)
    file, right = folder / "manifest.json", Shards(folder, "train").read(0, 2000).tolist()
    sealed = json.loads(file.read_text())
    manifest = json.dumps({**{k: v for k, v in sealed.items() if k != "blake2b"}, "format": 1}).encode()
    for damaged in damages(manifest, draw):
        file.write_bytes(damaged)
        try:
            shards = Shards(folder, "train")
        except UserError as error:
            said_well(error, folder)
        else:
            assert shards.read(0, 2000).tolist() == right
            assert shards.num_documents == len(shards.document_starts)


@pytest.mark.slow
def test_what_was_interrupted(
    text_folder: str,
    tokenizer: Tokenizer,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    """It is tokenised anew, which is said, or gone on with, to the same shards."""
    corpus, draw = Corpus(text_folder), random.Random(3)
    right = content(prepare(corpus, tokenizer, 0.2, 1))
    shutil.rmtree(cache / "shards")
    with monkeypatch.context() as patch:
        interrupted(patch, "zoo.data.text.progress:Writer.append", call=50)
        with pytest.raises(KeyboardInterrupt):
            prepare(corpus, tokenizer, 0.2, 1)
    (partial,) = (cache / "shards").glob(".*.partial")
    kept = cache / "kept"
    shutil.copytree(partial, kept)
    names, told, same = sorted(file.name for file in kept.iterdir()), 0, 0
    assert len(names) > 4
    for name in names:
        whole = (kept / name).read_bytes()
        for damaged in [None, *damages(whole, draw, rounds=6)]:
            shutil.rmtree(cache / "shards")
            shutil.copytree(kept, partial)
            if damaged is None:
                (partial / name).unlink()
            else:
                (partial / name).write_bytes(damaged)
            caplog.clear()
            assert content(prepare(corpus, tokenizer, 0.2, 1)) == right
            warned = [line for line in caplog.messages if "is tokenised again" in line]
            if warned:
                assert len(warned) == 1
                assert f"{partial / name} " in warned[0]
                told += 1
            else:  # what was appended after the last progress
                assert damaged is not None
                same += 1
    assert told > 80
    assert same < 40


@pytest.mark.parametrize(
    "attack", ["a shard elsewhere", "a full file elsewhere", "a link for a shard", "a link for the folder"]
)
def test_what_somebody_else_interrupted(text_folder: str, tokenizer: Tokenizer, cache: Path, attack: str):
    """Folders of shards may be shared: nothing outside them is cut, changed or removed."""
    corpus = Corpus(text_folder)
    with pytest.MonkeyPatch.context() as patch:
        interrupted(patch, "zoo.data.text.progress:Writer.append", call=50)
        with pytest.raises(KeyboardInterrupt):
            prepare(corpus, tokenizer, 0.2, 1)
    (partial,) = (cache / "shards").glob(".*.partial")
    outside = cache / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"precious")
    state = read_sealed(partial / "progress.json")
    record = {"bytes": 0, "blake2b": hashlib.blake2b(digest_size=16).hexdigest()}
    if attack == "a shard elsewhere":
        state["splits"]["train"]["shards"] = ["../../outside/precious"]
        state["open"]["../../outside/precious"] = record
    elif attack == "a full file elsewhere":
        state["files"]["../../outside/precious"] = record
    elif attack == "a link for a shard":
        name = state["splits"]["train"]["starts"]
        (partial / name).rename(outside / "precious")
        (partial / name).symlink_to(outside / "precious")
    else:
        shutil.rmtree(partial)
        partial.symlink_to(outside)
    if partial.is_symlink():
        with pytest.raises(UserError, match="is a symbolic link, and nothing is written through one"):
            prepare(corpus, tokenizer, 0.2, 1)
    content_before = (outside / "precious").read_bytes()
    if not partial.is_symlink():
        write_sealed(partial / "progress.json", state)
        assert prepare(corpus, tokenizer, 0.2, 1)
    assert (outside / "precious").read_bytes() == content_before


def test_trained_tokenizers(text_folder: str, tokenizer: Tokenizer, cache: Path):
    (folder,) = (f for f in (cache / "tokenizers").iterdir() if f.is_dir())
    draw, told, corpus = random.Random(4), 0, Corpus(text_folder)
    for name in ("tokenizer.json", "checksum.json"):
        whole = (folder / name).read_bytes()
        for damaged in damages(whole, draw):
            (folder / name).write_bytes(damaged)
            try:
                assert train_tokenizer(corpus, 300).hash == tokenizer.hash
            except UserError as error:
                told += said_well(error, folder / name)
        (folder / name).write_bytes(whole)
    assert told > 80
    (folder / "checksum.json").unlink()
    with pytest.raises(UserError, match=r"checksum\.json cannot be read .*; delete .* to train it again"):
        train_tokenizer(corpus, 300)


def test_a_tokenizer_of_ones_own(text_folder: str, tokenizer: Tokenizer, tmp_path: Path):
    """Nothing says what was in it, but it works or there is a sentence."""
    file, draw, worked = tmp_path / "own.json", random.Random(5), 0
    for damaged in damages(tokenizer.to_json().encode(), draw):
        file.write_bytes(damaged)
        try:
            assert isinstance(Tokenizer.from_file(file).encode("document 3: word"), list)
            worked += 1
        except UserError as error:
            said_well(error, file)
    assert worked < 40


def said_well(error: UserError, file: Path) -> bool:
    """One line that names the file or folder."""
    assert file.name in str(error)
    assert "\n" not in str(error)
    return True
