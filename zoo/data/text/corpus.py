"""Documents: the embedded default corpus, or a user's text, JSON lines, Parquet and token files or data sets."""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels.errors import UserError
from mixers import did_you_mean
from zoo.arguments import first_line
from zoo.data.text import needle_documents
from zoo.data.text.documents import Document, Tokens
from zoo.data.text.embedded import DOCUMENTATION, PARTS, Named, embedded_files, embedded_texts
from zoo.data.text.files import CODE, DAMAGED, READ, Listing, TextFile, find_files
from zoo.data.text.needle_documents import sentences
from zoo.data.text.records import BYTE_ORDER_MARK, DATASETS, Records
from zoo.data.text.token_files import SUFFIXES as TOKEN_SUFFIXES
from zoo.data.text.token_files import token_documents

log = logging.getLogger(__name__)

NEEDLES = "synthetic:needles"
BUILT_IN = ("embedded:", "synthetic:")  # how the names of text begin that is not in the user's files


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order.

    Args:
        path: A `.txt` or `.md` file (one document), a `.jsonl` or `.parquet` file (one document a row), all but
            `.parquet` also with `.gz`, `.zst` or `.xz`; tokens of Megatron (`.bin` with `.idx`) or datatrove (`.ds`),
            of the tokenizer that `data.tokenizer` names; a folder that is searched for these, or a list of
            files and folders. "datasets:NAME[:CONFIG[:SPLIT]]": a data set of Hugging Face, streamed (SPLIT is train
            by default). "datasets:FORMAT:FILES": files that its library reads (arrow, csv, json, parquet or text), at
            a path, a pattern or a URL. None: the embedded corpus, which is the source files of the standard library
            and Python's documentation topics; these are the parts "embedded:library" and "embedded:documentation", and
            "embedded:packages" is the text of all installed packages.
            "synthetic:needles": documents that train recall, with haystacks of up to 2,000 characters
            ("synthetic:needles:16000": 16,000).
        text_field: The field or column with a document's text; `meta.body` is a field inside a field.
        max_characters: Size of the embedded corpus or of the synthetic text, whose last document is cut there. None: no
            limit, for the embedded corpus only.
        key: The config key of these arguments, for messages.
        suffixes: Further suffixes of text files in folders, such as `.log`, or "code" for source code; None: no others.

    Raises (when used):
        UserError: A file is missing, empty, not text, or of an unsupported type.
    """

    path: str | list[str] | None = None
    text_field: str = "text"
    max_characters: int | None = 5_000_000
    key: str = "data"
    suffixes: Sequence[str] | None = None

    @property
    def built_in(self) -> bool:
        """Return whether this is the embedded corpus, a part of it, or synthetic text, rather than the user's files."""
        return self.path is None or (isinstance(self.path, str) and self.path.startswith(BUILT_IN))

    def __iter__(self) -> Iterator[Document]:
        """Yield the documents, without empty ones.

        Raises:
            UserError: A file cannot be read, or all documents are empty.
        """
        empty = total = 0
        for text in self._built_in_texts() if self.built_in else self._texts():
            empty, total = empty + (not len(text)), total + 1
            if len(text):
                yield text
        if empty:
            log.debug("Skipped %d empty documents of %d in %s.", empty, total, self)
        if empty == total:
            raise UserError(f"{self} has no text.")

    def texts(self) -> Iterator[str]:
        """Yield the documents, which must be text.

        Raises:
            UserError: As in `__iter__`, or a document is not text.
        """
        for document in self:
            if not isinstance(document, str):
                raise UserError(f"{self} has tokens; text is needed here.")
            yield document

    def __str__(self) -> str:
        return "the embedded corpus" if self.path is None else f"{self.key}.path={self.path}"

    def signature(self) -> str:
        """A hash of file names and contents, which changes when a file does.

        Of data sets and of the embedded corpus it has sizes, times and tags instead: none of them is read.
        """
        options: list[Any] = [self.max_characters if self.built_in else self.text_field]
        if self.built_in:
            files = [file for _, file in self._embedded_files()]
            versions: list[tuple] = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
            options += [NEEDLES, needle_documents.FORMAT, longest] if (longest := self._longest_haystack()) else []
        elif self._dataset:
            versions = [(self._dataset, self._records.dataset_hash(self._dataset))]
        else:
            try:
                versions = [file.identity() for file in self.files()]
            except OSError as error:
                raise UserError(f"{self.key}.path: {error.filename} cannot be read ({error.strerror}).") from error
        return hashlib.sha256(json.dumps([versions, *options]).encode()).hexdigest()

    def files(self) -> list[TextFile]:
        """The user's files, sorted by name within each folder.

        Raises:
            UserError: There are no files.
        """
        if not self._paths:
            raise UserError(f"{self.key}.path is an empty list; name a file or folder, or leave it out (null).")
        return [file for path in self._paths for file in self._find(path).files]

    @property
    def _paths(self) -> list[str]:
        return [self.path] if isinstance(self.path, str) else self.path or []

    @property
    def _dataset(self) -> str | None:
        """The path if it names a Hugging Face data set."""
        return self.path if isinstance(self.path, str) and self.path.startswith(DATASETS) else None

    @property
    def _records(self) -> Records:
        return Records(self.text_field, self.key)

    def _find(self, path: str) -> Listing:
        suffixes = [each for suffix in self.suffixes or () for each in (CODE if suffix == "code" else [suffix])]
        for suffix in suffixes:
            if not suffix.startswith(".") or suffix != suffix.lower():
                raise UserError(
                    f"{self.key}.suffixes: {suffix!r} must start with a dot and be in lower case, as .py, or be 'code'"
                )
        return find_files(path, f"{self.key}.path", suffixes)

    def warn_of_skipped(self) -> None:
        """Log a warning for each folder with files that are not read."""
        for path in [] if self.built_in or self._dataset else self._paths:
            listing = self._find(path)
            if skipped := listing.skipped.total():
                total, verb = skipped + len(listing.files), "is" if skipped == 1 else "are"
                counts = f"of {total} files in {path} {skipped} {verb} not read: {listing.summary()}"
                log.warning("%s.path: %s (supported: %s; %s.suffixes adds others).", self.key, counts, READ, self.key)

    def _texts(self) -> Iterator[Document]:
        if self._dataset:
            yield from self._records.dataset(self._dataset)
            return
        readers: dict[str, Callable[[TextFile], Iterator[Document]]]
        readers = {".jsonl": self._records.json_lines, ".parquet": self._records.parquet}
        readers |= dict.fromkeys(TOKEN_SUFFIXES, self._tokens)
        for file in self.files():
            try:
                yield from readers.get(file.suffix, self._text_file)(file)
            except (OSError, *DAMAGED) as error:
                reason = getattr(error, "strerror", None) or first_line(error)
                raise UserError(f"{self.key}.path: {file} cannot be read ({reason}).") from error

    def _tokens(self, file: TextFile) -> Iterator[Tokens]:
        try:
            yield from token_documents(Path(file.name))
        except UserError as error:
            raise UserError(f"{self.key}.path: {error}") from None

    def _text_file(self, file: TextFile) -> Iterator[str]:
        with file.open() as content:
            yield self._records.decode(content.read(), str(file)).removeprefix(BYTE_ORDER_MARK)

    def _built_in_texts(self) -> Iterator[str]:
        if self.max_characters is not None and self.max_characters < 1:
            raise UserError(f"{self.key}.max_characters is {self.max_characters}; it must be at least 1, or null.")
        left = self.max_characters
        texts = embedded_texts(self._embedded_files())
        if longest := self._longest_haystack():
            if left is None:
                raise UserError(f"{self.key}.max_characters is null, and {self.path} has no end; give it a size.")
            texts = needle_documents.needle_documents(list(sentences(texts)), longest)
        for text in texts:
            yield text if left is None else text[:left]
            left = None if left is None else left - len(text)
            if left is not None and left <= 0:
                return

    def _embedded_files(self) -> list[Named]:
        """The files of the embedded corpus, of the part of it, or of the text around synthetic needles."""
        part = DOCUMENTATION if self._longest_haystack() else self.path
        if part is not None and part not in PARTS:
            names = [*PARTS, NEEDLES]
            raise UserError(
                f"{self.key}.path: {part!r} is neither a part of the embedded corpus nor synthetic text"
                f"{did_you_mean(str(part), names)} (there are: {', '.join(names)})"
            )
        files = embedded_files(None if part is None else str(part))
        if not files:
            raise UserError(f"this Python has no files for {self}; set {self.key}.path to files of your own.")
        return files

    def _longest_haystack(self) -> int | None:
        """Characters of the longest haystack of synthetic needles; None if this is other text."""
        if not isinstance(self.path, str) or not f"{self.path}:".startswith(f"{NEEDLES}:"):
            return None
        size = self.path.removeprefix(NEEDLES).removeprefix(":")
        if size and not (size.isdecimal() and int(size) >= needle_documents.SHORTEST):
            raise UserError(
                f"{self.key}.path is {self.path!r}; after '{NEEDLES}:' stand the characters of the longest haystack, "
                f"{needle_documents.SHORTEST} or more."
            )
        return int(size or needle_documents.LONGEST)
