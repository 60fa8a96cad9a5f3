import gzip
import json
import os
import sys
import time
from itertools import islice
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from kernels.errors import UserError
from tests.zoo.data.contract import error_of
from zoo.data import Corpus, Shards, prepare, train_tokenizer
from zoo.data.text.files import content_digest
from zoo.files.hashing import file_digest as digest


def test_embedded_is_the_same_each_time_and_as_long_as_asked():
    texts = list(Corpus(max_characters=100_000))
    assert texts == list(Corpus(max_characters=100_000))
    assert sum(map(len, texts)) == 100_000
    assert len(texts) > 3
    assert any("def " in text for text in islice(Corpus(max_characters=None), 20))


@pytest.mark.parametrize("suffix", [".txt", ".md"])
def test_a_byte_order_mark_is_not_text(tmp_path: Path, suffix: str):
    (tmp_path / f"a{suffix}").write_text("\ufeffone \ufefftwo", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('\ufeff{"text": "three"}', encoding="utf-8")
    assert list(Corpus(str(tmp_path))) == ["one \ufefftwo", "three"]


@pytest.mark.parametrize("large", [False, True])
def test_the_signature_follows_the_content(tmp_path: Path, large: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))
    if large:
        monkeypatch.setattr("zoo.data.text.files.LARGE", 1)
    file = tmp_path / "text" / "a.txt"
    file.parent.mkdir()
    file.write_text("one two")
    corpus, times = Corpus(str(file.parent)), (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    before = corpus.signature()
    time.sleep(0.02)  # longer than a clock tick of the file system
    file.write_text("one six")
    os.utime(file, ns=times)
    after = corpus.signature()
    assert after != before
    content_digest.cache_clear()  # as in a new process
    monkeypatch.setattr(
        "zoo.data.text.files.file_digest", (lambda path: pytest.fail("read again")) if large else digest
    )
    assert corpus.signature() == after != Corpus(str(file.parent), "body").signature()
    monkeypatch.undo()
    file.write_text("one two")
    assert Corpus(str(file.parent)).signature() == before  # whatever its times are


def test_text_field(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"body": "x"}')
    assert list(Corpus(str(tmp_path), "body")) == ["x"]
    message = error_of(tmp_path)
    assert "a.jsonl, line 1, has no field 'text' (data.text_field); it has: 'body'." in message


def test_missing_file_names_the_near_one(tmp_path: Path):
    (tmp_path / "stories.txt").write_text("x")
    message = error_of(tmp_path / "storys.txt")
    assert "storys.txt does not exist; did you mean" in message
    assert message.endswith("stories.txt?")
    assert error_of(tmp_path / "far" / "away").endswith("away does not exist; put text there, or give another path.")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", b"", "a.txt is empty."),
        ("a.csv", b"x", "a.csv has the suffix '.csv'; a folder is needed, or one of .txt, .md,"),
        ("a.parquet.gz", b"x", "a.parquet.gz has the suffix '.parquet.gz'; a folder is needed, or one of .txt, .md,"),
        ("a.gz", b"x", "a.gz has the suffix '.gz'; a folder is needed, or one of .txt, .md,"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl, line 1, is not JSON"),
        ("a.txt", b"a\0b", "a.txt is binary (it has NUL bytes); UTF-8 text is needed."),
        ("a.txt", b"ab\xff", "a.txt is not UTF-8 text (invalid start byte at byte 2)."),
        ("a.jsonl", b'{"text": "x"}\n{"text"\n', "a.jsonl, line 2, is not JSON"),
        ("a.jsonl", b'{"text": 3}', "line 1, has int in the field 'text'; a string is needed."),
        (
            "a.jsonl",
            b"[1]",
            "a.jsonl, line 1, has no field 'text' (data.text_field); it is of type list, not an object.",
        ),
        ("a.jsonl", b'{"text": "\\ud800"}', "a.jsonl, line 1, is not valid Unicode"),
        ("a.jsonl", b'{"text": ""}', "a.jsonl has no text."),
        ("a.parquet", b"not parquet", "a.parquet is not a readable Parquet file"),
    ],
)
def test_unusable_file(tmp_path: Path, name: str, content: bytes, expected: str):
    (tmp_path / name).write_bytes(content)
    message = error_of(tmp_path / name)
    assert expected in message
    assert "\n" not in message


def test_parquet_without_the_column_or_a_value(tmp_path: Path):
    file = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"body": ["x", None]}), file)
    assert "a.parquet has no column 'text' (data.text_field); it has: 'body'." in error_of(file)
    assert "a.parquet, row 2, has NoneType in the field 'body'" in error_of(file, "body")


def test_nothing_to_read(tmp_path: Path):
    assert "has no supported files (.txt, .md, " in error_of(tmp_path)
    (tmp_path / "a.py").write_text("x")
    assert error_of(tmp_path).endswith("; it has 1 .py.")
    assert "data.path is an empty list" in error_of([])
    with pytest.raises(UserError, match=r"data\.max_characters is 0; it must be at least 1"):
        list(Corpus(max_characters=0))


def test_source_code_is_text(tmp_path: Path):
    for name in ("a.py", "b.rs", "c.txt", "d.PY", "e.so"):
        (tmp_path / name).write_text(name)
    assert list(Corpus(str(tmp_path))) == ["c.txt"]
    assert list(Corpus(str(tmp_path), suffixes=["code"])) == ["a.py", "b.rs", "c.txt", "d.PY"]
    assert list(Corpus(str(tmp_path), suffixes=["code", ".so"])) == ["a.py", "b.rs", "c.txt", "d.PY", "e.so"]
    assert list(Corpus([str(tmp_path / "b.rs"), str(tmp_path / "a.py")])) == ["b.rs", "a.py"]
    assert "e.so has the suffix '.so'" in error_of(tmp_path / "e.so")
    assert Corpus(str(tmp_path), suffixes=[".py"]).signature() != Corpus(str(tmp_path)).signature()
    with pytest.raises(UserError, match=r"^data.suffixes: 'py' must start with a dot and .* as .py, or be 'code'$"):
        list(Corpus(str(tmp_path), suffixes=["py"]))


def test_fields_inside_fields(tmp_path: Path):
    records = [{"a": {"b": {"c": "one"}}}, {"a": {"b.c": "two", "b": 3}}, {"a.b.c": "three", "a": 4}]
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(map(json.dumps, records)))
    assert list(Corpus(str(file), "a.b.c")) == ["one", "two", "three"]
    file.write_text(json.dumps({"a": {"b": {"d": 1, "e": 2}}}))
    assert "line 1, has no field 'a.b.c' (data.text_field); 'a.b' has: 'd', 'e'." in error_of(file, "a.b.c")
    assert "line 1, has no field 'a.b.d.e' (data.text_field); 'a.b.d' is of type int, not an object." in error_of(
        str(file), "a.b.d.e"
    )
    assert "line 1, has dict in the field 'a.b'; a string is needed" in error_of(file, "a.b")
    for table in ({"a": [{"b": "x", "d": 1}, {"b": "y", "d": 2}]}, {"a.b": ["x", "y"], "a": [1, 2]}):
        parquet.write_table(pyarrow.table(table), tmp_path / "a.parquet")
        assert list(Corpus(str(tmp_path / "a.parquet"), "a.b")) == ["x", "y"]
    parquet.write_table(pyarrow.table({"a": [{"d": 1}]}), tmp_path / "a.parquet")
    assert "row 1, has no field 'a.b' (data.text_field); 'a' has: 'd'." in error_of(tmp_path / "a.parquet", "a.b")


@pytest.mark.slow
def test_data_sets_of_hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A local builder of the library; names on the hub go through the same function."""
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "huggingface"))
    folder = tmp_path / "plays"
    for split, texts in {"train": ["one", "two", "three"], "test": ["four"]}.items():
        (folder / "data").mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"id": i, "play": {"text": text}}) for i, text in enumerate(texts)]
        (folder / "data" / f"{split}.jsonl").write_text("\n".join(lines))
    corpus = Corpus(f"datasets:{folder}", "play.text")
    assert list(corpus) == ["one", "two", "three"]
    assert list(Corpus(f"datasets:{folder}:default:test", "play.text")) == ["four"]
    corpus.warn_of_skipped()
    prepared = prepare(corpus, train_tokenizer(corpus, 257), 0.5, workers=1)
    assert Shards(prepared, "train").num_documents + Shards(prepared, "validation").num_documents == 3
    before = corpus.signature()
    assert Corpus(f"datasets:{folder}", "play.text").signature() == before
    (folder / "data" / "train.jsonl").write_text(json.dumps({"id": 1, "play": {"text": "other"}}))
    assert corpus.signature() != before
    assert "row 1, has no field 'text' (data.text_field); it has: 'id', 'play'." in error_of(f"datasets:{folder}")
    assert "cannot be read (Bad split: none. " in error_of(f"datasets:{folder}::none")
    assert "cannot be read (Couldn't find any data file at " in error_of(f"datasets:{tmp_path}/none")
    assert "cannot be read (Couldn't reach 'nobody/nothing' on the Hub" in error_of("datasets:nobody/nothing")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    (tmp_path / "a.json").write_text('[{"text": "one"}, {"text": "two"}]')
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"three\n\nfour"))
    assert list(Corpus(f"datasets:json:file://{tmp_path}/a.json")) == ["one", "two"]
    assert list(Corpus(f"datasets:text:{tmp_path}/b.*")) == ["three\n\nfour"]
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "needs the package datasets; pip install datasets." in error_of(f"datasets:{folder}")


def test_what_links_lead_to_is_read_once(tmp_path: Path):
    folder, outside = tmp_path / "texts", tmp_path / "outside"
    for place in (folder / "a", outside):
        place.mkdir(parents=True)
        (place / "1.txt").write_text(f"in {place.name}")
    (folder / "b").symlink_to(folder / "a")  # a sibling
    (folder / "A").symlink_to("a")  # before it in the order of names
    (folder / "2.txt").symlink_to(folder / "a" / "1.txt")
    (folder / "a" / "up").symlink_to(folder)  # a circle
    for name in ("o", "p"):
        (folder / name).symlink_to(outside)
    (folder / "q.txt").symlink_to(outside / "1.txt")
    assert sorted(Corpus(str(folder))) == ["in a", "in outside"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes")
def test_a_pipe_is_refused_at_once(tmp_path: Path):
    (tmp_path / "a.txt").write_text("text")
    os.mkfifo(tmp_path / "b.txt")
    for path in (tmp_path, tmp_path / "b.txt"):
        for use in (list, Corpus.signature):
            with pytest.raises(UserError, match=r"data\.path: .*b\.txt is a pipe or a device, not a regular file"):
                use(Corpus(str(path)))


def test_a_parquet_column_that_is_not_text(tmp_path: Path):
    """Other programs write bytes into columns of strings."""
    size = 3000  # in several batches
    values = pyarrow.array([b"fine"] * (size - 1) + [b"caf\xe9"], pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": values}), tmp_path / "a.parquet")
    assert f"a.parquet, row {size}, is not UTF-8 text (unexpected end of data at byte 3)." in error_of(
        str(tmp_path / "a.parquet")
    )


def test_a_folder_of_save_to_disk_has_a_hint(tmp_path: Path):
    (tmp_path / "data-00000-of-00001.arrow").touch()
    said = error_of(tmp_path)
    assert "it has 1 .arrow, as `save_to_disk` of datasets writes it; write Parquet instead" in said
