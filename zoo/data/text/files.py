"""The files of a corpus: text, records and tokens on local disks, also compressed."""

import difflib
import gzip
import json
import lzma
import os
import stat
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, cast

from kernels.errors import UserError
from zoo.arguments import check_not_empty
from zoo.data.text.cache import cache_folder
from zoo.data.text.place import is_url
from zoo.data.text.token_files import SUFFIXES as TOKEN_SUFFIXES
from zoo.data.text.token_files import companions
from zoo.files.atomic import atomic_write
from zoo.files.hashing import digest, file_digest

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")
_OPEN: dict[str, Callable] = {".gz": gzip.open, ".xz": lzma.open, ".zst": zstd.open}  # of compressed files
# Exceptions for damaged or truncated data, in addition to OSError.
DAMAGED = (EOFError, zlib.error, lzma.LZMAError, zstd.ZstdError)
READ = f"{', '.join(SUFFIXES)}, all but the last also with {', '.join(_OPEN)}; tokens: .bin with an index, .ds"
_CODE = (
    "c cc clj cpp cs css cu cuh cxx dart el erl ex f90 go h hh hpp hs html java jl js jsx kt lean lisp lua m ml php pl "
    "proto ps1 py r rb rs rst scala sh sql swift tex ts tsx v vhd zig"
)
# source code is read where a file is named itself, and in folders if `suffixes` has "code"
CODE = tuple(f".{name}" for name in _CODE.split())
LARGE = 64 << 20  # bytes, from which hashes are kept in the cache; hashing less takes milliseconds
_TOKENIZER = "tokenizer.json"  # often in the same folder as the text


@dataclass(frozen=True)
class TextFile:
    """A local file of text, given by its path."""

    name: str

    def __str__(self) -> str:
        return self.name

    @property
    def suffix(self) -> str:
        """The suffix in lower case, without that of the compression: `.txt` for `a.txt.gz`."""
        return _suffixes(self.name)[0]

    def identity(self) -> tuple:
        """JSON-serialisable values that change with the content: name, size and hash."""
        status = os.stat(self.name)
        # the last time cannot be set by programs, so that the hash of a state never changes
        state = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        described_by = [file_digest(name) for name in companions(self.name, os.path.isfile)]
        return (self.name, status.st_size, content_digest(self.name, state), *described_by)

    def open(self) -> BinaryIO:
        """Open the decompressed content for reading."""
        return cast(BinaryIO, _OPEN.get(_suffixes(self.name)[1], open)(self.name, "rb"))


@dataclass(frozen=True)
class Listing:
    """The files at a path.

    Attributes:
        files: The files that are read.
        skipped: Number of other files in the folder by suffix, and of `tokenizer.json`. Hidden files, and files in
            hidden folders (`.git`), are never read, and counted only if they would be read otherwise.
    """

    files: list[TextFile]
    skipped: Counter[str] = field(default_factory=Counter)

    def summary(self) -> str:
        """The skipped files in words: `2 .py, 1 .png`."""
        return ", ".join(f"{number} {suffix}" for suffix, number in self.skipped.most_common())


def find_files(path: str, key: str, suffixes: Collection[str] = ()) -> Listing:
    """The file at a path, or all files in a folder, sorted by name.

    Args:
        path: A path.
        key: The config key of the path, for messages.
        suffixes: Further suffixes of text, such as `.py`.

    Raises:
        UserError: The path is empty or a URL, there are no files, or a file is empty or of an unsupported type.
    """
    check_not_empty(key, path)
    if is_url(path):
        raise UserError(
            f"{key}: {path} is a URL, which the package datasets reads; write datasets:text:{path}, or json, csv or "
            "parquet instead of text."
        )
    place = Path(path).expanduser().absolute()
    try:
        return _found(place, key, suffixes)
    except OSError as error:  # for instance no permission for a folder in it, or a broken link
        raise UserError(f"{key}: {error.filename or place} cannot be read ({error.strerror}).") from error


def _suffixes(name: str) -> tuple[str, str]:
    """The suffix of a file without compression, and that of its compression or an empty string, in lower case."""
    path = Path(name.lower())
    return (Path(path.stem).suffix, path.suffix) if path.suffix in _OPEN else (path.suffix, "")


def _is_read(name: str, further: Collection[str]) -> bool:
    suffix, compression = _suffixes(name)
    plain = (".parquet", *TOKEN_SUFFIXES)  # never compressed
    return suffix in (*SUFFIXES, *further, *TOKEN_SUFFIXES) and not (compression and suffix in plain)


def _choose(folder: Path, further: Collection[str]) -> tuple[list[str], Counter[str]]:
    """The names in a folder to read, and the number of other files by suffix."""
    read, skipped = [], Counter[str]()
    present = {*_walk(folder)}
    described = {each for name in present for each in companions(name, present.__contains__)}
    for name in present - described:
        parts, text = Path(name).relative_to(folder).parts, _is_read(name, further)
        if any(part.startswith(".") for part in parts):
            skipped["hidden"] += text
        elif parts[-1] == _TOKENIZER:
            skipped[_TOKENIZER] += 1
        elif _suffixes(name) == (".bin", "") and not companions(name, present.__contains__):
            skipped[".bin without an index"] += 1
        elif text:
            read.append(name)
        else:
            skipped["".join(_suffixes(name)) or "without a suffix"] += 1
    return read, +skipped


def _found(path: Path, key: str, further: Collection[str]) -> Listing:
    if path.is_symlink() and not path.exists():
        raise UserError(f"{key}: {path} is a link to {path.readlink()}, which does not exist.")
    if not path.exists():
        raise UserError(f"{key}: {path} does not exist; {_suggestion(path)}")
    if not path.is_dir():
        _check_regular(path, key)
        if not _is_read(str(path), (*further, *CODE)):
            suffix = "".join(_suffixes(str(path)))
            raise UserError(f"{key}: {path} has the suffix {suffix!r}; a folder is needed, or one of {READ}.")
        if not path.stat().st_size:
            raise UserError(f"{key}: {path} is empty.")
        return Listing([TextFile(str(path))])
    names, skipped = _choose(path, further)
    # Of several names of a file, links among them, one; its own name if that is in the folder.
    names = sorted(names, key=lambda name: (not os.path.islink(name), name))
    files = sorted(map(Path, {os.path.realpath(name): name for name in names}.values()))
    for file in files:
        _check_regular(file, key)
    listing = Listing([TextFile(str(file)) for file in files], skipped)
    if not files:
        others = f"; it has {listing.summary()}" if skipped else ""
        if skipped[".arrow"]:
            others += ", as `save_to_disk` of datasets writes it; write Parquet instead (`dataset.to_parquet`)"
        raise UserError(f"{key}: the folder {path} has no supported files ({READ}){others}.")
    return listing


def _check_regular(file: Path, key: str) -> None:
    if not stat.S_ISREG(file.stat().st_mode):  # a pipe would wait for its writer
        raise UserError(f"{key}: {file} is a pipe or a device, not a regular file.")


def _walk(folder: Path) -> Iterator[str]:
    """All files in a folder, then those behind its links to folders; each folder is visited once."""

    def fail(error: OSError) -> None:
        raise error

    seen = set()
    starts = [str(folder)]
    for start in starts:
        for place, inside, names in os.walk(start, onerror=fail):
            real = os.path.realpath(place)
            if real in seen:
                inside.clear()
                continue
            seen.add(real)
            starts += sorted(path for name in inside if os.path.islink(path := os.path.join(place, name)))
            yield from (os.path.join(place, name) for name in names)


def _suggestion(path: Path) -> str:
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    similar = difflib.get_close_matches(path.name, siblings, n=1)
    return f"did you mean {path.parent / similar[0]}?" if similar else "put text there, or give another path."


@lru_cache(maxsize=1 << 16)
def content_digest(path: str, state: tuple[int, ...]) -> str:
    """Return the XXH3 hash of a file, which is read again only if its state has changed.

    Args:
        path: The file.
        state: Its device, inode, size, and the times at which its content and its inode changed.
    """
    if state[2] < LARGE:
        return file_digest(path)
    record = cache_folder() / "hashes" / f"{digest(path.encode())}.json"
    try:
        cached = json.loads(record.read_bytes())
        if cached["state"] == list(state) and isinstance(cached["xxh3_128"], str):
            return cached["xxh3_128"]
    except (OSError, ValueError, LookupError, TypeError):  # none yet, or damaged
        pass
    content_hash = file_digest(path)
    with suppress(OSError), atomic_write(record) as file:  # without a cache the file is read again next time
        file.write(json.dumps({"state": state, "xxh3_128": content_hash}).encode())
    return content_hash
