"""Corpora behind URLs: read through fsspec, of which `memory://` needs no network."""

import gzip
import shutil
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import fsspec
import pyarrow
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations
from pyarrow import parquet

from kernels.errors import UserError
from zoo.data import Corpus, MixedText, Shards, Source, TextData
from zoo.data.text.compressed import zstd


@pytest.fixture
def bucket() -> Iterator[MemoryFileSystem]:
    """An empty memory:// file system; there is one for all of a process."""
    memory = fsspec.filesystem("memory")
    yield memory
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


def error_of(path: str) -> str:
    with pytest.raises(UserError) as caught:
        list(Corpus(path))
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def all_kinds(tmp_path: Path) -> Path:
    folder = tmp_path / "all"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "d.txt").write_bytes("one\r\ntwo é".encode())
    (folder / "b.jsonl").write_text('{"text": "three"}\n\n{"text": ""}\n{"text": "four"}\n' * 2)
    (folder / "e.json.gz").write_bytes(gzip.compress(b'["seven", {"text": "eight"}]'))
    (folder / "f.jsonl.ZST").write_bytes(zstd.compress(b'{"text": "nine"}\n') * 2)
    (folder / "ignored.bin").write_bytes(b"\0")
    (folder / "tokenizer.json").write_text("{}")
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "old.md").write_text("thrown away")
    (folder / ".hidden" / "state").write_text("not text")
    parquet.write_table(pyarrow.table({"text": ["five", "six"], "id": [1, 2]}), folder / "c.PARQUET")
    return folder


def test_a_remote_folder_holds_what_a_local_one_does(bucket: MemoryFileSystem, all_kinds: Path):
    bucket.put(f"{all_kinds}/", "/bucket/all/", recursive=True)
    local = list(Corpus(str(all_kinds)))
    assert local == [*["three", "four"] * 2, "five", "six", "one\r\ntwo é", "seven", "eight", "nine", "nine"]
    for path in ("memory://bucket/all", "memory://bucket/all/", f"file://{all_kinds}"):
        assert list(Corpus(path)) == local
    assert list(Corpus("memory://bucket/all/b.jsonl")) == local[:4]
    assert list(Corpus([str(all_kinds / "c.PARQUET"), "memory://bucket/all/deep"])) == local[4:7]
    shutil.make_archive(str(all_kinds / "packed"), "zip", all_kinds / "deep")
    bucket.put(str(all_kinds / "packed.zip"), "/bucket/packed.zip")
    for path in ("zip://d.txt::memory://bucket/packed.zip", "zip://::memory://bucket/packed.zip"):
        assert list(Corpus(path)) == local[6:7]
    assert list(Corpus("simplecache::memory://bucket/all/c.PARQUET")) == ["five", "six"]


@pytest.mark.slow
def test_what_is_skipped_is_named_in_one_line(
    bucket: MemoryFileSystem, all_kinds: Path, caplog: pytest.LogCaptureFixture
):
    for name in ("deep/a.py", "b.py", "c.PNG", "LICENSE", "d.csv.gz"):
        (all_kinds / name).write_text("x")
    bucket.put(f"{all_kinds}/", "/bucket/all/", recursive=True)
    for folder in (str(all_kinds), "memory://bucket/all", f"file://{all_kinds}/"):
        caplog.clear()
        Corpus([str(all_kinds / "b.jsonl"), folder]).warn_of_skipped()
        (line,) = caplog.messages
        assert f"data.path: of 13 files in {folder} 8 are not read: 2 .py, " in line
        assert "(supported: .txt, .md, .jsonl, .json, .parquet, all but the last also with .gz, .zst" in line
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
    assert [line[:30] for line in caplog.messages if "not read" in line] == ["data.sources.own.path: of 13 f"]


def test_links_are_followed_once(all_kinds: Path, tmp_path: Path):
    """To folders elsewhere, and in circles."""
    before = list(Corpus(str(all_kinds)))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "z.md").write_text("linked")
    (all_kinds / "zz").symlink_to(tmp_path / "elsewhere")
    (all_kinds / "deep" / "up").symlink_to(all_kinds)
    assert list(Corpus(str(all_kinds))) == [*before, "linked"]
    (all_kinds / "gone.txt").symlink_to(tmp_path / "nowhere.txt")
    assert "gone.txt cannot be read (No such file or directory)" in error_of(str(all_kinds))


@pytest.mark.slow
def test_a_web_server(all_kinds: Path):
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), lambda *given: Quiet(*given, directory=str(all_kinds)))
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        base = f"http://127.0.0.1:{server.server_port}"
        assert list(Corpus([f"{base}/b.jsonl?key=1", f"{base}/c.PARQUET"])) == ["three", "four"] * 2 + ["five", "six"]
        listed = Corpus(f"{base}/")
        assert list(listed) == list(Corpus(str(all_kinds)))  # what its pages link to
        before = listed.signature()
        (all_kinds / "b.jsonl").write_text('{"text": "seven"}')
        assert Corpus(f"{base}/").signature() != before
        assert f"data.path: {base}/none.txt does not exist" in error_of(f"{base}/none.txt")
    finally:
        server.shutdown()
        server.server_close()


def test_signature_follows_remote_files(bucket: MemoryFileSystem):
    bucket.pipe("/bucket/a.jsonl", b'{"text": "x"}')
    corpus = Corpus("memory://bucket/")
    before = corpus.signature()
    assert corpus.signature() == before == Corpus("memory://bucket").signature()
    bucket.pipe("/bucket/a.jsonl", b'{"text": "y"}')  # of the same size
    changed = corpus.signature()
    bucket.pipe("/bucket/b.txt", b"z")
    assert len({before, changed, corpus.signature(), Corpus("memory://bucket", "body").signature()}) == 4


@pytest.mark.slow
def test_remote_text_is_tokenised_once(bucket: MemoryFileSystem, text_folder: str, monkeypatch: pytest.MonkeyPatch):
    bucket.put(f"{text_folder}/", "/bucket/texts/", recursive=True)
    sizes = {"vocab_size": 300, "sequence_length": 32, "validation_fraction": 0.2}
    local = TextData(text_folder, **sizes)
    hashes = {name: local.identity()[name] for name in ("data_hash", "sequence_length")}
    remote = TextData("memory://bucket/texts", **sizes, preprocessing_workers=2)
    assert {name: remote.identity()[name] for name in hashes} == hashes
    folder = remote.train.shards.folder
    assert folder != local.train.shards.folder
    monkeypatch.setattr("zoo.data.text.shards._build", None)
    monkeypatch.setattr(MemoryFileSystem, "_open", None)  # nothing is read again
    again = TextData("memory://bucket/texts", **sizes)
    again.setup("fit")
    assert again.train.shards.folder == folder
    assert len(Shards(folder, "train")) == len(local.train.shards)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("memory://bucket/nothing", "data.path: memory://bucket/nothing does not exist."),
        ("memory://bucket/empty.txt", "data.path: memory://bucket/empty.txt is empty."),
        ("memory://bucket/a.csv", "a.csv has the suffix '.csv'; a folder is needed, or one of .txt,"),
        ("memory://bucket/others/", "data.path: the folder memory://bucket/others/ has no supported files"),
        ("memory://bucket/bad.jsonl", "data.path: memory://bucket/bad.jsonl, line 2, is not JSON"),
        ("memory://bucket/bad.parquet", "memory://bucket/bad.parquet is not a readable Parquet file"),
        ("memry://bucket/a.txt", "fsspec cannot open memry://bucket/a.txt (Protocol not known: memry); did you mean"),
        (
            "unpacked://a.txt",
            "data.path: unpacked://a.txt needs a package that is not installed (pip install unpacked)",
        ),
    ],
)
def test_unusable_url(bucket: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch, path: str, expected: str):
    missing = {"class": "no_such_package.FileSystem", "err": "pip install unpacked"}
    monkeypatch.setitem(known_implementations, "unpacked", missing)
    contents = {"empty.txt": b"", "a.csv": b"x", "others/a.bin": b"x", "bad.parquet": b"x"}
    contents["bad.jsonl"] = b'{"text": "x"}\n{"text"\n'
    for name, content in contents.items():
        bucket.pipe(f"/bucket/{name}", content)
    assert expected in error_of(path)


@pytest.mark.parametrize(("method", "said"), [("info", "cannot be listed"), ("_open", "cannot be read")])
def test_a_file_system_that_fails(bucket: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch, method: str, said: str):
    """Each has errors of its own, of many lines, and not all are OSErrors."""

    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("the token has expired\nask for another")

    bucket.pipe("/bucket/a.txt", b"x")
    monkeypatch.setattr(MemoryFileSystem, method, fail)
    assert error_of("memory://bucket/a.txt") == (f"data.path: memory://bucket/a.txt {said} (the token has expired).")


def test_an_error_names_the_source(bucket: MemoryFileSystem, tmp_path: Path):
    bucket.pipe("/bucket/a.jsonl", b'{"body": "x"}')
    (tmp_path / "a.txt").write_text("text")
    sources = {"web": Source("memory://bucket/a.jsonl"), "notes": Source(str(tmp_path / "a.txt"))}
    message = r"data\.sources\.web\.path: .*, has no field 'text' \(data\.sources\.web\.text_field\); it has: 'body'\."
    with pytest.raises(UserError, match=message):
        MixedText(sources).setup()
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(UserError, match=r"data\.sources\.files\.path: memory://nowhere does not exist"):
        MixedText({"files": Source("memory://nowhere")}).get_tokenizer()
