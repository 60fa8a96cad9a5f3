"""`reproductions/mixed_corpus.py`: pages become text, and repetitions are left out."""

import gzip
from pathlib import Path

import pytest

from reproductions import mixed_corpus
from reproductions.mixed_corpus import Document, distinct, fits, package_documents, split_of

SENTENCES = [
    f"This is sentence {i} of a page that is not like the others, and it can be read by you.\n" for i in range(40)
]
LARGEST = {"prose": 5000, "code": 500}


def prose(first: int, last: int, package: str = "book") -> Document:
    return Document(package, "prose", "".join(SENTENCES[first:last]))


def test_a_page_is_its_text_without_menus():
    page = "<head><title>no</title></head><nav>Menu</nav><p>Two\n words.</p><pre>a\n  b</pre><script>x</script>"
    assert mixed_corpus.tidy(mixed_corpus.from_page(page)) == "Two words.\n\na\n  b\n"


def test_a_package_gives_the_documents_of_its_kind(tmp_path: Path):
    (tmp_path / "skipped").mkdir()
    for name in ("a.txt", "skipped/b.txt", "c.png"):
        (tmp_path / name).write_text("".join(SENTENCES[:9]))
    (tmp_path / "d.html.gz").write_bytes(gzip.compress("".join(f"<p>{s}</p>" for s in SENTENCES[9:]).encode()))
    found = package_documents(("book", "prose", tmp_path, "/skipped/"))
    assert [doc.text.splitlines()[0] for doc in found] == [SENTENCES[0].strip(), SENTENCES[9].strip()]


def test_prose_is_english_sentences():
    assert fits("".join(SENTENCES[:9]), "prose")
    assert not fits("Dies ist ein Satz, der nicht dazu passt.\n" * 20, "prose")
    assert not fits("0123456789 abc\n" * 50, "code")


def test_repeated_documents_are_left_out():
    documents = [prose(0, 10), prose(0, 10, "copy"), prose(4, 12, "mostly"), prose(6, 20, "new")]
    assert [doc.package for doc in distinct(documents, LARGEST)] == ["book", "new"]


def test_no_package_exceeds_its_share():
    texts = [doc.text for doc in distinct([prose(0, 10), prose(10, 20), prose(20, 30)], {"prose": 2000})]
    assert sum(map(len, texts)) <= 2000
    assert len(texts) == 2


def test_a_document_belongs_to_one_split():
    splits = [split_of(f"document {i}") for i in range(3000)]
    assert splits == [split_of(f"document {i}") for i in range(3000)]
    assert splits.count("validation") == pytest.approx(30, abs=15)
    assert splits.count("test") == pytest.approx(30, abs=15)
