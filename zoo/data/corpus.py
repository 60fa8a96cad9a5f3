"""Documents: the embedded default corpus, or a user's text, JSON Lines and Parquet files."""

import difflib
import hashlib
import importlib.util
import json
import logging
import os
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kernels.errors import UserError

log = logging.getLogger(__name__)

SUFFIXES = (".txt", ".jsonl", ".parquet")
# Not text that somebody wrote for readers: tests, generated tables, vendored or obsolete packages.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings"}
_LEFT_OUT |= {"idle_test", "pydoc_data", "__pycache__", "__phello__"}


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order.

    Args:
        path: a `.txt` file (one document), a `.jsonl` or `.parquet` file (one document a row), a folder that is
            searched for these, or a list of all of that. None: the embedded corpus, which is the standard library's
            own source files and Python's documentation topics.
        text_field: the field or column that holds a document's text.
        max_characters: where the embedded corpus ends; its last document is cut there. None: no limit.

    Raises (when used):
        UserError: a file that is missing, empty, not text, or of another kind.
    """

    path: str | list[str] | None = None
    text_field: str = "text"
    max_characters: int | None = 5_000_000

    def __iter__(self) -> Iterator[str]:
        """Yield the documents. Empty ones hold no data and are passed over."""
        empty = total = 0
        for text in self._embedded() if self.path is None else self._texts():
            empty, total = empty + (not text), total + 1
            if text:
                yield text
        if empty:
            log.debug("Passed over %d empty documents of %d in %s.", empty, total, self)
        if empty == total:
            raise UserError(f"{self} holds no text.")

    def __str__(self) -> str:
        return "the embedded corpus" if self.path is None else f"data.path={self.path}"

    def signature(self) -> str:
        """A hash that changes when a file does: of names, sizes and modification times, so nothing is read."""
        files = [f for _, f in _library_files()] if self.path is None else self.files()
        stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        options = self.max_characters if self.path is None else self.text_field
        return hashlib.sha256(json.dumps([stats, options]).encode()).hexdigest()

    def files(self) -> list[Path]:
        """The user's files, each folder's sorted by name. Raises UserError where there are none."""
        paths = [self.path] if isinstance(self.path, str) else self.path or []
        if not paths:
            raise UserError("data.path is an empty list; name a file or folder, or leave it out (null).")
        found: list[Path] = []
        for path in map(Path, paths):
            path = path.expanduser().absolute()
            if path.is_dir():
                inside = sorted(f for f in path.rglob("*") if f.suffix.lower() in SUFFIXES and f.is_file())
                if not inside:
                    raise UserError(f"data.path: the folder {path} has no {', '.join(SUFFIXES)} file in it.")
                found += inside
                continue
            if not path.exists():
                raise UserError(f"data.path: {path} does not exist{_near_name(path)}.")
            if path.suffix.lower() not in SUFFIXES:
                raise UserError(
                    f"data.path: {path} has the suffix {path.suffix!r}; a folder or {', '.join(SUFFIXES)} is needed."
                )
            if path.stat().st_size == 0:
                raise UserError(f"data.path: {path} is empty.")
            found.append(path)
        return found

    def _texts(self) -> Iterator[str]:
        readers = {".txt": self._text_file, ".jsonl": self._json_lines, ".parquet": self._parquet}
        for file in self.files():
            try:
                yield from readers[file.suffix.lower()](file)
            except OSError as error:
                raise UserError(f"data.path: {file} cannot be read ({error.strerror or error}).") from error

    def _text_file(self, file: Path) -> Iterator[str]:
        yield _decode(file.read_bytes(), str(file))

    def _json_lines(self, file: Path) -> Iterator[str]:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                where = f"{file}, line {number},"
                text = _decode(line, where).removeprefix("\ufeff").strip()
                if not text:
                    continue
                try:
                    record = json.loads(text)
                except ValueError as error:
                    raise UserError(f"data.path: {where} is not JSON ({error}).") from None
                if not isinstance(record, dict) or self.text_field not in record:
                    names = ", ".join(map(repr, record)) if isinstance(record, dict) else type(record).__name__
                    raise UserError(
                        f"data.path: {where} has no field {self.text_field!r} (data.text_field); it has: {names}."
                    )
                yield self._checked(record[self.text_field], where)

    def _parquet(self, file: Path) -> Iterator[str]:
        import pyarrow  # heavy, and only some users have such files
        from pyarrow import parquet

        try:
            with parquet.ParquetFile(file) as table:
                names = table.schema_arrow.names
                if self.text_field not in names:
                    raise UserError(
                        f"data.path: {file} has no column {self.text_field!r} (data.text_field); "
                        f"it has: {', '.join(map(repr, names))}."
                    )
                row = 0
                for rows in table.iter_batches(batch_size=1024, columns=[self.text_field]):
                    for text in rows.column(0).to_pylist():
                        row += 1
                        yield self._checked(text, f"{file}, row {row},")
        except pyarrow.ArrowException as error:
            first_line = str(error).splitlines()[0]
            raise UserError(f"data.path: {file} is not a readable Parquet file ({first_line}).") from error

    def _checked(self, text: object, where: str) -> str:
        if not isinstance(text, str):
            raise UserError(
                f"data.path: {where} has {type(text).__name__} in the field {self.text_field!r}; a string is needed."
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
            raise UserError(f"data.path: {where} is not valid Unicode ({error.reason}).") from None
        return text

    def _embedded(self) -> Iterator[str]:
        if self.max_characters is not None and self.max_characters < 1:
            raise UserError(f"data.max_characters is {self.max_characters}; it must be at least 1, or null.")
        left = self.max_characters
        for text in _library_texts():
            yield text if left is None else text[:left]
            left = None if left is None else left - len(text)
            if left is not None and left <= 0:
                return


def _decode(data: bytes, where: str) -> str:
    if b"\0" in data:
        raise UserError(f"data.path: {where} is binary (it has NUL bytes); UTF-8 text is needed.")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"data.path: {where} is not UTF-8 text ({error.reason} at byte {error.start}).") from None


def _near_name(path: Path) -> str:
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, siblings, n=1)
    return f"; did you mean {path.parent / near[0]}?".removesuffix("?") if near else ""


def _library_files() -> list[tuple[str, Path]]:
    """Names and files of the embedded corpus, in the order of a hash of the name: any head of it is a mixture."""
    root = Path(sysconfig.get_paths()["stdlib"])
    named = []
    for folder, inside, names in os.walk(root):
        inside[:] = [name for name in inside if name not in _LEFT_OUT and not name.startswith("config-")]
        files = [Path(folder, n) for n in names if n.endswith(".py") and not n.startswith("_sysconfigdata")]
        named += [(file.relative_to(root).as_posix(), file) for file in files]
    topics = importlib.util.find_spec("pydoc_data.topics") if importlib.util.find_spec("pydoc_data") else None
    if topics and topics.origin:
        named.append(("pydoc_data/topics.py", Path(topics.origin)))
    if not named:
        raise UserError("this Python has no standard library sources for the embedded corpus; set data.path.")
    return sorted(named, key=lambda pair: hashlib.sha256(pair[0].encode()).digest())


def _library_texts() -> Iterator[str]:
    for name, file in _library_files():
        if name == "pydoc_data/topics.py":
            from pydoc_data.topics import topics  # 0.5 MB that few programs need

            yield from (topics[key] for key in sorted(topics))
            continue
        try:
            with tokenize.open(file) as source:  # honours a coding line
                yield source.read()
        except (SyntaxError, UnicodeDecodeError):
            log.info("Left %s out of the embedded corpus: it cannot be decoded.", file)
