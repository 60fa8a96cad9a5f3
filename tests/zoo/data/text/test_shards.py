import json
import pickle
import subprocess
from pathlib import Path

import numpy as np
import pytest

from kernels.errors import UserError
from tests.forked_python import forked_python
from tests.zoo.data.contract import documents
from zoo.data import Corpus, Shards, Tokenizer, prepare, train_tokenizer
from zoo.files.sealed_json import read_sealed, write_sealed


def texts(shards: Shards, tokenizer: Tokenizer) -> list[str]:
    found = list(documents(shards))
    assert all(ids[-1] == tokenizer.eos_id and tokenizer.eos_id not in ids[:-1] for ids in found)
    return [tokenizer.decode(ids[:-1]) for ids in found]


def both(path: str | None, workers: int = 1, fraction: float = 0.2) -> tuple[Shards, Shards, Tokenizer]:
    corpus = Corpus(path, max_characters=300_000)
    tokenizer = train_tokenizer(corpus, 300)
    folder = prepare(corpus, tokenizer, fraction, workers)
    return Shards(folder, "train"), Shards(folder, "validation"), tokenizer


@pytest.mark.parametrize("workers", [1, 2])
def test_every_document_is_on_one_side_and_whole(text_folder: str, workers: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("zoo.data.text.progress.SHARD_TOKENS", 1000)  # several files, and documents over their edges
    train, validation, tokenizer = both(text_folder, workers)
    assert train.manifest["dtype"] == "<u2"
    assert len(train.manifest["splits"]["train"]["shards"]) > 1
    left, right = texts(train, tokenizer), texts(validation, tokenizer)
    assert sorted(left + right) == sorted(Corpus(text_folder))
    assert len(left) == train.num_documents > len(right) == validation.num_documents > 0
    assert train.read(990, 1010).tolist() == train.read(0, len(train)).tolist()[990:1010]


def test_split_depends_on_content_alone(text_folder: str):
    first, held_out, tokenizer = both(text_folder)
    held_out = texts(held_out, tokenizer)
    for file in Path(text_folder).iterdir():  # other names, so another order
        file.rename(file.with_name(f"{hash(file.name) % 997}-{file.name}"))
    (Path(text_folder) / "copy.txt").write_text(held_out[0])
    second, validation, tokenizer = both(text_folder)
    assert sorted(texts(validation, tokenizer)) == sorted([*held_out, held_out[0]])
    assert first.data_hash != second.data_hash


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_each_side_has_a_document(text_folder: str, fraction: float):
    train, validation, _ = both(text_folder, fraction=fraction)
    assert min(train.num_documents, validation.num_documents) == 1


def test_single_document_is_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    text = "".join(f"line {i}\n" for i in range(1000))
    (tmp_path / "one.txt").write_text(text)
    caplog.set_level("INFO")
    train, validation, tokenizer = both(str(tmp_path / "one.txt"))
    head, tail = texts(train, tokenizer)[0], texts(validation, tokenizer)[0]
    assert head + tail == text
    assert head.endswith("\n")
    assert 0.15 < len(tail) / len(text) < 0.25
    assert "is a single document: its head is used for training, its tail for validation." in caplog.text


@pytest.mark.slow
def test_long_document_is_shared_out_without_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "long"
    folder.mkdir()
    for i in range(2):
        (folder / f"{i}.txt").write_text("".join(f"if {i * j}:\n\n    go({j})\n" for j in range(2000)))
    monkeypatch.setattr("zoo.data.text.encoding.PIECE_CHARACTERS", 5000)
    train, validation, tokenizer = both(str(folder), 2)
    whole = [[*tokenizer.encode(text), tokenizer.eos_id] for text in Corpus(str(folder))]
    assert sorted([*documents(train), *documents(validation)]) == sorted(whole)


def test_wide_vocabulary_needs_wide_tokens(text_folder: str, tmp_path: Path):
    small = train_tokenizer(Corpus(text_folder), 300)
    small.save(tmp_path / "wide.json")
    content = json.loads((tmp_path / "wide.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 70_000, "content": "<|wide|>"})
    content["model"]["vocab"]["<|wide|>"] = 70_000
    (tmp_path / "wide.json").write_text(json.dumps(content))
    wide = Tokenizer.from_file(tmp_path / "wide.json")
    assert wide.vocab_size == 70_001
    shards = Shards(prepare(Corpus(text_folder), wide, 0.2, 1), "train")
    assert shards.manifest["dtype"] == "<u4"
    assert set(texts(shards, wide)) < set(Corpus(text_folder))


def test_prepared_once_and_pickled_small(text_folder: str, monkeypatch: pytest.MonkeyPatch):
    train, _, tokenizer = both(text_folder)
    monkeypatch.setattr("zoo.data.text.shards._build", None)
    again, _, _ = both(text_folder)
    assert again.folder == train.folder
    copy = pickle.loads(pickle.dumps(train))
    assert copy.read(3, 50).tolist() == train.read(3, 50).tolist()
    assert len(pickle.dumps(train)) < 5000
    assert (tokenizer.hash, len(train)) == (train.manifest["tokenizer_hash"], sum(map(len, documents(train))))


@pytest.mark.parametrize("split", ["train", "validation"])
def test_damage_is_named(text_folder: str, split: str):
    train, _, _ = both(text_folder)
    for name in (f"{split}-00000.bin", f"{split}.starts.bin"):
        file = train.folder / name
        content = file.read_bytes()
        flipped = bytearray(content)
        flipped[len(flipped) // 2] ^= 4
        file.write_bytes(flipped)
        with pytest.raises(UserError, match=rf"the shard .*{name} was altered"):
            Shards(train.folder, split)
        Shards(train.folder, split, verify=False)
        file.write_bytes(content[:-8])
        with pytest.raises(UserError, match=rf"{name} has {len(content) - 8} bytes, its manifest says {len(content)};"):
            Shards(train.folder, split, verify=False)
        file.unlink()
        with pytest.raises(UserError, match=rf"the shard .*{name} is missing"):
            Shards(train.folder, split)
        file.write_bytes(content)
        Shards(train.folder, split)
    manifest = train.folder / "manifest.json"
    content = read_sealed(manifest)
    write_sealed(manifest, {**content, "format": 99})
    with pytest.raises(UserError, match="has format 99, this version reads 2"):
        Shards(train.folder, split)
    manifest.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"manifest\.json is damaged \(it has lost the hash of its content\)"):
        Shards(train.folder, split)
    write_sealed(manifest, {**content, "splits": 5})  # as a stranger can seal it
    with pytest.raises(UserError, match=r"manifest\.json is damaged \(TypeError"):
        Shards(train.folder, split)
    manifest.write_text("{")
    with pytest.raises(UserError, match=r"manifest\.json is damaged \(it is not JSON.*; delete .* to prepare it again"):
        Shards(train.folder, split)
    manifest.unlink()
    with pytest.raises(UserError, match=r"manifest\.json is missing"):
        Shards(train.folder, split)


@pytest.mark.slow
def test_two_processes_prepare_at_once(text_folder: str, cache: Path, tmp_path: Path):
    program = (
        "import sys; from zoo.data.text.corpus import Corpus; from zoo.data.text.shards import *; "
        "from zoo.data.text.tokenizer import train_tokenizer; c = Corpus(sys.argv[1]); "
        "sys.stdout.write(Shards(prepare(c, train_tokenizer(c, 300), 0.2), 'train').data_hash)"
    )
    (tmp_path / "program.py").write_text(program)
    command = [forked_python(), str(tmp_path / "program.py"), text_folder]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    hashes = {process.communicate(timeout=240)[0] for process in started}
    assert [process.returncode for process in started] == [0, 0]
    assert len(hashes) == 1
    assert len([f for f in (cache / "shards").iterdir() if f.is_dir()]) == 1


def test_unwritable_cache_is_named(text_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"the cache folder .*file.* cannot be written .*; set ZOO_CACHE"):
        both(text_folder)


def test_a_split_of_one_character(tmp_path: Path):
    (tmp_path / "a.txt").write_text("a")
    corpus = Corpus(str(tmp_path / "a.txt"))
    with pytest.raises(UserError, match="single character"):
        prepare(corpus, train_tokenizer(corpus, 300), 0.5, 1)


def test_tokens_are_int64(text_folder: str):
    train, _, _ = both(text_folder)
    assert train.read(0, 5).dtype == np.int64
    assert train.read(5, 5).shape == (0,)
    with pytest.raises(IndexError, match=f"token {len(train)} of {len(train)}"):
        train.read(0, len(train) + 1)
