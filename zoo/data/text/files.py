"""The files of a corpus, on local disks or, through fsspec, at URLs."""

import difflib
import io
import json
import os
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast

import fsspec

from kernels.errors import UserError
from mixers import did_you_mean
from zoo.arguments import check_not_empty
from zoo.data.text.cache import cache_folder
from zoo.data.text.compressed import COMPRESSIONS, decompressed
from zoo.data.text.token_files import SUFFIXES as TOKEN_SUFFIXES
from zoo.data.text.token_files import companions
from zoo.files.atomic import atomic_write
from zoo.files.hashing import digest, file_digest

SUFFIXES = (".txt", ".md", ".jsonl", ".json", ".parquet")
READ = f"{', '.join(SUFFIXES)}, all but the last also with {', '.join(COMPRESSIONS)}; tokens: .bin with an index, .ds"
_CODE = (
    "c cc clj cpp cs css cu cuh cxx dart el erl ex f90 go h hh hpp hs html java jl js jsx kt lean lisp lua m ml php pl "
    "proto ps1 py r rb rs rst scala sh sql swift tex ts tsx v vhd zig"
)
# source code is read where a file is named itself, and in folders if `suffixes` has "code"
CODE = tuple(f".{name}" for name in _CODE.split())
# Names that file systems use for the version of a file. Not all of its metadata: some count accesses.
_STATE = ["ETag", "etag", "md5Hash", "content_md5", "generation", "LastModified", "last_modified", "updated"]
_STATE += ["mtime", "modified", "created"]
_READ_AHEAD = 1 << 20
LARGE = 64 << 20  # bytes, from which hashes are kept in the cache; hashing less takes milliseconds
_TOKENIZER = "tokenizer.json"  # often in the same folder as the text


@dataclass(frozen=True)
class TextFile:
    """A file of text, local or remote.

    Attributes:
        name: Its path or URL.
        version: JSON-serialisable values by which its state is known: name, size in bytes, and times or tags (a web
            server may have neither). They change with the content, unless somebody restores its times.
        filesystem: Its file system; None: a local disk.
        path: Its path in that file system.
    """

    name: str
    version: tuple
    filesystem: fsspec.AbstractFileSystem | None = None
    path: str = ""

    def __str__(self) -> str:
        return self.name

    @property
    def suffix(self) -> str:
        """The suffix in lower case, without that of the compression: `.txt` for `a.txt.gz`."""
        return _suffixes(self.name)[0]

    def identity(self) -> tuple:
        """JSON-serialisable values that change with the content: a hash of it, or the version if that is remote."""
        if self.filesystem is not None:
            return self.version
        status = os.stat(self.name)
        # the last time cannot be set by programs, so that the hash of a state never changes
        state = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        described_by = [file_digest(name) for name in companions(self.name, os.path.isfile)]
        return (self.name, status.st_size, content_digest(self.name, state), *described_by)

    def open(self) -> BinaryIO:
        """Open the decompressed content for reading."""
        compression = _suffixes(self.name)[1]
        return decompressed(self._raw(), compression) if compression else self._raw()

    def _raw(self) -> BinaryIO:
        if self.filesystem is None:
            return Path(self.name).open("rb")
        raw = self.filesystem.open(self.path, "rb")
        # buffered, since many file systems read a block for each line
        return cast(BinaryIO, io.BufferedReader(raw, _READ_AHEAD))


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
    """The file at a path or URL, or all files in a folder, sorted by name.

    Args:
        path: A path or URL.
        key: The config key of the path, for messages.
        suffixes: Further suffixes of text, such as `.py`.

    Raises:
        UserError: The path is empty, there are no files, a file is empty or of an unsupported type, or the protocol of
            the URL needs a package.
    """
    check_not_empty(key, path)
    if is_url(path):
        return _remote(path, key, suffixes)
    return _local(Path(path).expanduser().absolute(), key, suffixes)


def is_url(path: str) -> bool:
    """Return whether a path is a URL, to be opened by fsspec."""
    return "://" in path


def _suffixes(name: str) -> tuple[str, str]:
    """The suffix of a file without compression, and that of its compression or an empty string, in lower case."""
    if is_url(name):  # in a chain such as zip://a.txt::s3://bucket/b.zip the first URL
        name = next(url for url in name.split("::") if is_url(url)).partition("://")[2].partition("?")[0]
    path = PurePosixPath(name.lower())
    if path.suffix in COMPRESSIONS:
        return PurePosixPath(path.stem).suffix, path.suffix
    return path.suffix, ""


def _is_read(name: str, further: Collection[str]) -> bool:
    suffix, compression = _suffixes(name)
    return suffix in (*SUFFIXES, *further, *TOKEN_SUFFIXES) and not (
        compression and suffix in (".parquet", *TOKEN_SUFFIXES)
    )


def _choose(
    names: Iterable[str], inside: Callable[[str], str], further: Collection[str]
) -> tuple[list[str], Counter[str]]:
    """The names to read, and the number of other files by suffix; `inside` gives a name's part within the folder."""
    read, skipped = [], Counter[str]()
    present = {*names}
    described = {each for name in present for each in companions(name, present.__contains__)}
    for name in present - described:
        parts, text = inside(name).split("/"), _is_read(name, further)
        hidden = any(part.startswith(".") for part in parts)
        if hidden:
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


def _local(path: Path, key: str, further: Collection[str]) -> Listing:
    try:
        if path.is_symlink() and not path.exists():
            raise UserError(f"{key}: {path} is a link to {path.readlink()}, which does not exist.")
        if not path.exists():
            raise UserError(f"{key}: {path} does not exist; {_suggestion(path)}")
        if path.is_dir():
            names, skipped = _choose(_walk(path), lambda name: Path(name).relative_to(path).as_posix(), further)
            # Of several names of a file, links among them, one; its own name if that is in the folder.
            once = {
                os.path.realpath(name): name
                for name in sorted(names, key=lambda name: (not os.path.islink(name), name))
            }
            return _checked(
                [_local_file(file, key) for file in sorted(map(Path, once.values()))], skipped, str(path), key
            )
        file = _local_file(path, key)
        _check_file(str(path), path.stat().st_size, key, further)
        return Listing([file])
    except OSError as error:  # for instance no permission for a folder in it, or a broken link
        raise UserError(f"{key}: {error.filename or path} cannot be read ({error.strerror}).") from error


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


def _checked(files: list[TextFile], skipped: Counter[str], folder: str, key: str) -> Listing:
    listing = Listing(files, skipped)
    if not files:
        others = f"; it has {listing.summary()}" if skipped else ""
        if skipped[".arrow"]:
            others += ", as `save_to_disk` of datasets writes it; write Parquet instead (`dataset.to_parquet`)"
        raise UserError(f"{key}: the folder {folder} has no supported files ({READ}){others}.")
    return listing


def _local_file(file: Path, key: str) -> TextFile:
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):  # a pipe would wait for its writer
        raise UserError(f"{key}: {file} is a pipe or a device, not a regular file.")
    return TextFile(str(file), (str(file), status.st_size, status.st_mtime_ns))


def _check_file(name: str, size: int | None, key: str, further: Collection[str]) -> None:
    if not _is_read(name, (*further, *CODE)):
        suffix = "".join(_suffixes(name))
        raise UserError(f"{key}: {name} has the suffix {suffix!r}; a folder is needed, or one of {READ}.")
    if size == 0:  # None: a web server may not report it
        raise UserError(f"{key}: {name} is empty.")


def _suggestion(path: Path) -> str:
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    similar = difflib.get_close_matches(path.name, siblings, n=1)
    return f"did you mean {path.parent / similar[0]}?" if similar else "put text there, or give another path."


def _remote(url: str, key: str, further: Collection[str]) -> Listing:
    fs, path = filesystem(url, key)
    try:
        info = fs.info(path)
        if info["type"] != "directory" and not url.endswith("/"):
            _check_file(url, info["size"], key, further)
            return Listing([_remote_file(url, url, fs, path, info)])
        infos = fs.find(path, detail=True)
        # buckets may list folders, too
        paths = {fs.unstrip_protocol(name): name for name in infos if not name.endswith("/")}
        names, skipped = _choose(paths, lambda name: paths[name].removeprefix(path).strip("/"), further)
        for name in (paths[name] for name in names):
            if infos[name].get("size") is None:  # a web server's listing has less than the files' own headers
                infos[name] = fs.info(name)
        files = [_remote_file(url, name, fs, paths[name], infos[paths[name]]) for name in sorted(names)]
    except UserError:
        raise
    except FileNotFoundError as error:
        reason = f" or cannot be reached ({first_line(error.__cause__)})" if error.__cause__ else ""
        raise UserError(f"{key}: {url} does not exist{reason}.") from None
    except Exception as error:  # file systems raise exceptions of any type: no access, no network, no bucket
        raise UserError(f"{key}: {url} cannot be listed ({first_line(error)}).") from error
    return _checked(files, skipped, url, key)


def filesystem(url: str, key: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The fsspec file system of a URL or path, and its path there; messages name the config key.

    Raises:
        UserError: The URL cannot be opened, or its protocol needs a package that is not installed.
    """
    try:
        return fsspec.url_to_fs(url)
    except ImportError as error:  # its message names the package
        raise UserError(f"{key}: {url} needs a package that is not installed ({first_line(error)}).") from None
    except ValueError as error:
        protocols, name = fsspec.available_protocols(), url.partition("://")[0].split("::")[-1]
        hint = "" if name in protocols else did_you_mean(name, protocols)
        raise UserError(f"{key}: fsspec cannot open {url} ({first_line(error)}){hint}") from None
    except Exception as error:  # for instance wrong or missing credentials
        raise UserError(f"{key}: {url} cannot be opened ({first_line(error)}).") from error


def _remote_file(url: str, name: str, filesystem: fsspec.AbstractFileSystem, path: str, info: dict) -> TextFile:
    state = [f"{key}={info[key]}" for key in _STATE if info.get(key) is not None]
    # includes the URL, since files in two archives may have the same name
    return TextFile(name, (url.rstrip("/"), name, info["size"], *state), filesystem, path)


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or its type if it has no message."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


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
