"""Local files of a corpus: which are read, and which are named as skipped."""

from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from kernels.errors import UserError
from tests.zoo.data.contract import error_of
from zoo.data import Corpus, MixedText, Source
from zoo.data.text.files import zstd


@pytest.fixture
def all_kinds(tmp_path: Path) -> Path:
    folder = tmp_path / "all"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "d.txt").write_bytes("one\r\ntwo é".encode())
    (folder / "b.jsonl").write_text('{"text": "three"}\n\n{"text": ""}\n{"text": "four"}\n' * 2)
    (folder / "f.jsonl.ZST").write_bytes(zstd.compress(b'{"text": "nine"}\n') * 2)
    (folder / "ignored.bin").write_bytes(b"\0")
    (folder / "tokenizer.json").write_text("{}")
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "old.md").write_text("thrown away")
    (folder / ".hidden" / "state").write_text("not text")
    parquet.write_table(pyarrow.table({"text": ["five", "six"], "id": [1, 2]}), folder / "c.PARQUET")
    return folder


def test_a_folder_holds_files_of_all_kinds(all_kinds: Path):
    texts = [*["three", "four"] * 2, "five", "six", "one\r\ntwo é", "nine", "nine"]
    assert list(Corpus(str(all_kinds))) == texts
    assert list(Corpus(str(all_kinds / "b.jsonl"))) == texts[:4]
    assert list(Corpus([str(all_kinds / "c.PARQUET"), str(all_kinds / "deep")])) == texts[4:7]


@pytest.mark.slow
def test_what_is_skipped_is_named_in_one_line(all_kinds: Path, caplog: pytest.LogCaptureFixture):
    for name in ("deep/a.py", "b.py", "c.PNG", "LICENSE", "d.csv.gz"):
        (all_kinds / name).write_text("x")
    Corpus([str(all_kinds / "b.jsonl"), str(all_kinds)]).warn_of_skipped()
    (line,) = caplog.messages
    assert f"data.path: of 12 files in {all_kinds} 8 are not read: 2 .py, " in line
    assert "(supported: .txt, .md, .jsonl, .parquet, all but the last also with .gz, .xz, .zst" in line
    told = line.partition("read: ")[2].partition(" (")[0].split(", ")
    assert sorted(told) == [
        "1 .bin without an index",
        "1 .csv.gz",
        "1 .png",
        "1 hidden",
        "1 tokenizer.json",
        "1 without a suffix",
        "2 .py",
    ]
    caplog.clear()
    Corpus(str(all_kinds / "b.jsonl")).warn_of_skipped()
    Corpus().warn_of_skipped()
    assert not caplog.messages
    sources = {"own": Source(str(all_kinds)), "library": Source("embedded:library", max_characters=50_000)}
    MixedText(sources, vocab_size=300, preprocessing_workers=1).prepare_data()
    assert [line[:30] for line in caplog.messages if "not read" in line] == ["data.sources.own.path: of 12 f"]


def test_a_link_to_nothing(tmp_path: Path):
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere.txt")
    assert "gone.txt cannot be read (No such file or directory)" in error_of(tmp_path)


def test_an_error_names_the_source(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"body": "x"}')
    sources = {"web": Source(str(tmp_path / "a.jsonl"))}
    message = r"data\.sources\.web\.path: .*, has no field 'text' \(data\.sources\.web\.text_field\); it has: 'body'\."
    with pytest.raises(UserError, match=message):
        MixedText(sources).setup()
    with pytest.raises(UserError, match=r"data\.sources\.files\.path: .*nowhere does not exist"):
        MixedText({"files": Source(str(tmp_path / "nowhere"))}).get_tokenizer()


def test_a_url_is_left_to_the_library():
    assert "write datasets:text:s3://bucket/a.txt, or json, csv or parquet" in error_of("s3://bucket/a.txt")
