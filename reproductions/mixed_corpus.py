"""Build a corpus of prose and code from Debian packages, for runs on machines without other text (`data/mixed.yaml`).

    PYTHONPATH=. python reproductions/mixed_corpus.py corpora/mixed

Requires Debian bookworm: `apt-get update`, the network, and `groff` for manual pages. No package is installed. The
folder receives `train-prose.jsonl.xz`, `validation-code.jsonl.xz` and so on with one document a line, `tokenizer.json`
with 16,384 entries, and `sources.csv` with the version, licences and characters of each package. The same versions of
packages and of groff give the same files; older versions are at snapshot.debian.org.

Documents go to a split by the hash of their text: 1 % to validation, 1 % to the test. A document is left out if half of
it is in lines of documents before it, if prose is not English sentences, or if code is mostly numbers. In prose, lines
that three other documents have (menus, licences) are dropped.
"""

import argparse
import csv
import gzip
import hashlib
import json
import lzma
import re
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from multiprocessing import Pool
from pathlib import Path
from typing import Any, NamedTuple

from zoo.data.text.corpus import Corpus
from zoo.data.text.tokenizer import train_tokenizer

RECIPE = Path(__file__).with_suffix(".toml")
CODE = frozenset(["py", "pm", "rb", "rs", "go", "tcl", "hpp", "h", "ts", "js", "R", "sql"])
PAGES = frozenset(["html", "htm", "page", "en"])  # Apache's end in .html.en
TEXT = frozenset(["txt", "rst", "md", "pod"])
BLOCKS = frozenset(
    [
        "p",
        "div",
        "li",
        "tr",
        "h1",
        "h2",
        "h3",
        "h4",
        "h5",
        "h6",
        "dt",
        "dd",
        "pre",
        "table",
        "section",
        "title",
        "br",
        "item",
        "note",
    ]
)
HIDDEN = frozenset(["script", "style", "nav", "head", "header", "footer", "form", "button", "select", "svg"])
COMMON = frozenset(
    [
        "the",
        "of",
        "to",
        "a",
        "and",
        "is",
        "in",
        "that",
        "for",
        "it",
        "be",
        "as",
        "with",
        "are",
        "this",
        "or",
        "not",
        "on",
        "by",
        "an",
        "if",
        "can",
        "you",
    ]
)
SHORTEST, LONGEST = 300, 250_000  # characters of a document
REPEATED = 25  # characters of a line from which it counts as a repetition
# for text, bytes do not come in words of four; the largest preset takes twice the time for half a per cent
PACKED = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 1 << 28, "lc": 4, "lp": 0, "pb": 0}]


class Document(NamedTuple):
    """A document of a package."""

    package: str
    kind: str
    text: str


class _Words(HTMLParser):
    """The visible text of a page; text in `pre` keeps its lines."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.hidden, self.preformatted = list[str](), 0, 0

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.hidden += tag in HIDDEN
        self.preformatted += tag == "pre"
        if tag in BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self.hidden = max(self.hidden - (tag in HIDDEN), 0)
        self.preformatted = max(self.preformatted - (tag == "pre"), 0)
        if tag in BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.parts.append(data if self.preformatted else re.sub(r"\s+", " ", data))


def from_page(markup: str) -> str:
    """The text of a page in HTML or Mallard."""
    words = _Words()
    words.feed(markup)
    return "".join(words.parts).replace("¶", "")


def from_manual(source: bytes) -> str:
    """A manual page as text."""
    command = ["groff", "-mandoc", "-Tutf8", "-rLL=110n", "-rHY=0", "-P-cbou"]
    text = subprocess.run(command, input=source, capture_output=True, check=True).stdout.decode(errors="replace")
    return re.sub(r"(?<=\S) {2,3}(?=\S)", " ", text)  # of justified lines


def from_dictionary(entries: str) -> Iterator[str]:
    """Parts of about 5,000 characters of a dictionary, each of whole entries."""
    part = ""
    for entry in re.split(r"\n(?=\S)", entries):
        part += entry + "\n"
        if len(part) > 5000:
            yield part
            part = ""
    yield part


def texts(path: Path, kind: str) -> Iterator[str]:
    """The documents in a file: none if it is of another kind."""
    content, name = path.read_bytes(), path.name
    if name.endswith((".gz", ".dz")):
        content, name = gzip.decompress(content), name[:-3]
    suffix = name.rpartition(".")[2] if "." in name else ""
    if kind == "prose" and "/man/" in str(path):
        yield from_manual(content)
        return
    text = content.decode("utf-8", errors="replace")
    if kind == "code":
        yield from [text] if suffix in CODE else []
    elif suffix in PAGES:
        yield from_page(text)
    elif suffix == "dict":
        yield from from_dictionary(text)
    elif suffix in TEXT or ("/fortunes/" in str(path) and not suffix):
        yield text


def tidy(text: str) -> str:
    """Text without spaces at the ends of lines, and without more than one empty line in a row."""
    text = re.sub(r"[ \t\xa0]+\n", "\n", text.replace("\r\n", "\n").expandtabs(8) + "\n")
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def fits(text: str, kind: str) -> bool:
    """Return whether prose has the words of English sentences, and code more letters than digits."""
    if not SHORTEST <= len(text) <= LONGEST or "\0" in text or text.count("\ufffd") > 3:
        return False
    letters, digits = sum(map(str.isalpha, text)), sum(map(str.isdigit, text))
    if kind == "code":
        return (
            digits < letters / 5 and len(text) < 120 * (text.count("\n") + 1) and sum(map(ord, text)) < 200 * len(text)
        )
    words = re.findall(r"[a-z]+", text.lower())
    return letters > 0.55 * len(text) and sum(word in COMMON for word in words) > 0.17 * len(words)


def package_documents(job: tuple[str, str, Path, str]) -> list[Document]:
    """The documents of an unpacked package."""
    package, kind, folder, skipped = job
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink() and not re.search(skipped, f"{package}/{path.relative_to(folder)}"):
            found += [text for raw in texts(path, kind) if fits(text := tidy(raw), kind)]
    return [Document(package, kind, text) for text in found]


def distinct(documents: Iterable[Document], largest: dict[str, int]) -> Iterator[Document]:
    """Documents that are new in more than half of their text, and of each package so many characters.

    Of a package that is larger, the documents with the smallest hashes remain.
    """
    seen, total = Counter[bytes](), Counter[str]()
    for package, kind, text in documents:
        lines = text.splitlines(keepends=True)
        marks = [digest(line.strip()) if len(line) >= REPEATED else b"" for line in lines]
        new = sum(len(line) for line, mark in zip(lines, marks, strict=True) if seen[mark] == 0 or not mark)
        if kind == "prose":
            text = tidy("".join(line for line, mark in zip(lines, marks, strict=True) if not mark or seen[mark] < 3))
        seen.update({mark for mark in marks if mark})
        if new > len("".join(lines)) / 2 and len(text) >= SHORTEST and total[package] + len(text) <= largest[kind]:
            total[package] += len(text)
            yield Document(package, kind, text)


def digest(text: str) -> bytes:
    """A hash of a text."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def split_of(text: str) -> str:
    """The split of a document."""
    return {0: "validation", 1: "test"}.get(int.from_bytes(digest(text)) % 100, "train")


def write_texts(file: Path, documents: Iterable[str]) -> None:
    """Write documents as compressed JSON lines."""
    rows = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents)
    file.write_bytes(lzma.compress(rows.encode(), filters=PACKED))


def unpack(packages: Iterable[str], folder: Path) -> dict[str, str]:
    """Download packages and unpack each into a folder of its name; return their versions."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [name for name in packages if not (folder / name).is_dir()]
    with tempfile.TemporaryDirectory(dir=folder) as downloads:
        if missing:
            subprocess.run(["apt-get", "download", "-q", *missing], cwd=downloads, check=True)
        for file in sorted(Path(downloads).glob("*.deb")):
            subprocess.run(["dpkg-deb", "-x", file, folder / file.name.partition("_")[0]], check=True)
            version = subprocess.check_output(["dpkg-deb", "-f", file, "Version"], text=True)
            (folder / f"{file.name.partition('_')[0]}.version").write_text(version.strip())
    return {name: (folder / f"{name}.version").read_text().strip() for name in packages}


def licences(folder: Path) -> str:
    """The licences that a package names."""
    files = [file for file in folder.glob("usr/share/doc/*/copyright") if file.is_file()]
    text = "\n".join(file.read_text(errors="replace") for file in files)
    named = re.findall(
        r"^License:[ \t]*(\w[\w.+-]*(?:,? (?:or|and|with) \w[\w.+-]*)*)[ \t]*$", text, re.MULTILINE | re.IGNORECASE
    )
    named = named or re.findall(r"/common-licenses/([\w.-]*\w)", text) or ["see its copyright file"]
    return "; ".join(sorted(set(map(str.strip, named))))


def build(target: Path, packages: Path, characters: int) -> None:
    """Write the corpus, of about so many characters, into a folder."""
    recipe = tomllib.loads(RECIPE.read_text())
    names = {name: kind for kind in ("prose", "code") for name in recipe[kind].split()}
    versions = unpack(names, packages)
    skipped = "|".join(f"(?:{pattern})" for pattern in recipe["skipped"])
    with Pool() as pool:
        jobs = [(name, kind, packages / name, skipped) for name, kind in names.items()]
        groups = pool.imap(package_documents, jobs)
        ordered = (doc for group in groups for doc in sorted(group, key=lambda doc: digest(doc.text)))
        documents = list(distinct(ordered, recipe["largest_package"]))
    total = sum(len(doc.text) for doc in documents)
    if total > characters:  # of all packages the same part, by hash
        part = int(characters / total * 2**64)
        documents = [doc for doc in documents if int.from_bytes(digest(doc.text + "\n")) < part]
    target.mkdir(parents=True, exist_ok=True)
    files: dict[Path, list[str]] = defaultdict(list)
    for doc in documents:
        files[target / f"{split_of(doc.text)}-{doc.kind}.jsonl.xz"].append(doc.text)
    with Pool() as pool:
        pool.starmap(write_texts, files.items(), chunksize=1)
    train_tokenizer(Corpus([str(file) for file in sorted(target.glob("train-*.xz"))]), 16384).save(target)
    sizes: dict[str, Counter[str]] = defaultdict(Counter)
    for doc in documents:
        sizes[doc.package].update({"documents": 1, "characters": len(doc.text)})
    with (target / "sources.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["package", "version", "kind", "documents", "characters", "licences"])
        for name, kind in names.items():
            counts = sizes[name]
            row = [name, versions[name], kind, counts["documents"], counts["characters"], licences(packages / name)]
            writer.writerow(row)
    kinds = Counter[str]()
    for doc in documents:
        kinds[doc.kind] += len(doc.text)
    sys.stdout.write(f"{len(documents):,} documents, {dict(kinds)} characters, in {target}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("--packages", type=Path, default=Path("corpora/packages"), help="folder of unpacked packages")
    parser.add_argument("--characters", type=int, default=190_000_000)
    arguments = parser.parse_args()
    build(arguments.target, arguments.packages, arguments.characters)
