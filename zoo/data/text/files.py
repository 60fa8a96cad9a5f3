"""The files of a corpus: found on local disks, or by fsspec behind any URL that it knows."""

import difflib
import io
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast

import fsspec

from kernels.errors import UserError
from mixers import did_you_mean
from zoo.data.text.compressed import COMPRESSIONS, decompressed

SUFFIXES = (".txt", ".md", ".jsonl", ".json", ".parquet")
READ = f"{', '.join(SUFFIXES)}, all but the last also with {', '.join(COMPRESSIONS)}"
# What file systems call the state of a file. Not all of what they say: some count the accesses.
_STATE: tuple[str, ...] = (
    "ETag",
    "etag",
    "md5Hash",
    "content_md5",
    "generation",
    "LastModified",
    "last_modified",
    "updated",
)
_STATE += ("mtime", "modified", "created")
_READ_AHEAD = 1 << 20
_TOKENIZER = "tokenizer.json"  # often beside the text, and no text itself


@dataclass(frozen=True)
class TextFile:
    """A file of text, local or remote.

    Attributes:
        name: Its path, or its URL.
        version: What changes when its content does, for JSON: name, size in bytes, and times or tags (a web server
            may have none of these).
        filesystem: Where it lies; None: on a local disk.
        path: Its name there.
    """

    name: str
    version: tuple
    filesystem: fsspec.AbstractFileSystem | None = None
    path: str = ""

    def __str__(self) -> str:
        return self.name

    @property
    def kind(self) -> str:
        """The suffix, in small letters; of a compressed file the one before, so `.txt` of `a.txt.gz`."""
        return _suffixes(self.name)[0]

    def open(self) -> BinaryIO:
        """What is in the file, to be read from the start."""
        compression = _suffixes(self.name)[1]
        return decompressed(self._raw(), compression) if compression else self._raw()

    def _raw(self) -> BinaryIO:
        if self.filesystem is None:
            return Path(self.name).open("rb")
        raw = self.filesystem.open(self.path, "rb")
        return cast(BinaryIO, io.BufferedReader(raw, _READ_AHEAD))  # many of them read a line a block at a time


@dataclass(frozen=True)
class Found:
    """The files behind a path.

    Attributes:
        files: Those that are read.
        skipped: How many others of each suffix are in the folder, and of `tokenizer.json`. Hidden files and folders
            (`.git`) are never read, and only those are counted that else would be.
    """

    files: list[TextFile]
    skipped: Counter[str] = field(default_factory=Counter)

    def told(self) -> str:
        """What is skipped, in words: `2 .py, 1 .png`."""
        return ", ".join(f"{number} {suffix}" for suffix, number in self.skipped.most_common())


def find_files(path: str, key: str) -> Found:
    """The files behind a path or URL: itself, or all of a folder, sorted by name.

    Args:
        path: A file, a folder, or a URL of one such as `s3://bucket/texts/`.
        key: What an error calls the path, such as `data.path`.

    Raises:
        UserError: there is none, it is empty or of another kind, or the URL's protocol needs a package.
    """
    return _remote(path, key) if is_url(path) else _local(Path(path).expanduser().absolute(), key)


def is_url(path: str) -> bool:
    """Whether fsspec must open a path."""
    return "://" in path


def _suffixes(name: str) -> tuple[str, str]:
    """The suffix of what is in a file, and that of its compression or nothing, in small letters."""
    if is_url(name):  # of a chain such as zip://a.txt::s3://bucket/b.zip the first that has a path
        name = next(url for url in name.split("::") if is_url(url)).partition("://")[2].partition("?")[0]
    path = PurePosixPath(name.lower())
    if path.suffix in COMPRESSIONS:
        return PurePosixPath(path.stem).suffix, path.suffix
    return path.suffix, ""


def _is_read(name: str) -> bool:
    kind, compression = _suffixes(name)
    return kind in SUFFIXES and not (kind == ".parquet" and compression)


def _choose(names: Iterable[str], inside: Callable[[str], str]) -> tuple[list[str], Counter[str]]:
    """The names that are read, and how many others there are of each suffix; `inside` is the part within a folder."""
    read, skipped = [], Counter[str]()
    for name in names:
        parts, text = inside(name).split("/"), _is_read(name)
        hidden = any(part.startswith(".") for part in parts)
        if hidden:
            skipped["hidden"] += text
        elif parts[-1] == _TOKENIZER:
            skipped[_TOKENIZER] += 1
        elif text:
            read.append(name)
        else:
            skipped["".join(_suffixes(name)) or "without a suffix"] += 1
    return read, +skipped


def _local(path: Path, key: str) -> Found:
    try:
        if not path.exists():
            raise UserError(f"{key}: {path} does not exist{_near_name(path)}.")
        if path.is_dir():
            names, skipped = _choose(_walk(path), lambda name: Path(name).relative_to(path).as_posix())
            return _checked([_local_file(file) for file in sorted(map(Path, names))], skipped, str(path), key)
        _check_kind(str(path), path.stat().st_size, key)
        return Found([_local_file(path)])
    except OSError as error:  # a folder in it is closed, a link is broken
        raise UserError(f"{key}: {error.filename or path} cannot be read ({error.strerror}).") from error


def _walk(folder: Path) -> Iterator[str]:
    """All files in a folder, also behind links to folders, each folder once."""

    def fail(error: OSError) -> None:
        raise error

    known = set()
    for place, inside, names in os.walk(folder, onerror=fail, followlinks=True):
        known.add(os.path.realpath(place))
        inside[:] = [name for name in inside if os.path.realpath(os.path.join(place, name)) not in known]
        yield from (os.path.join(place, name) for name in names)


def _checked(files: list[TextFile], skipped: Counter[str], folder: str, key: str) -> Found:
    found = Found(files, skipped)
    if not files:
        others = f"; it has {found.told()}" if skipped else ""
        raise UserError(f"{key}: the folder {folder} has no file in it that is read ({READ}){others}.")
    return found


def _local_file(file: Path) -> TextFile:
    return TextFile(str(file), (str(file), file.stat().st_size, file.stat().st_mtime_ns))


def _check_kind(name: str, size: int | None, key: str) -> None:
    if not _is_read(name):
        suffix = "".join(_suffixes(name))
        raise UserError(f"{key}: {name} has the suffix {suffix!r}; a folder is needed, or one of {READ}.")
    if size == 0:  # None: a web server need not say
        raise UserError(f"{key}: {name} is empty.")


def _near_name(path: Path) -> str:
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, siblings, n=1)
    return f"; did you mean {path.parent / near[0]}?".removesuffix("?") if near else ""


def _remote(url: str, key: str) -> Found:
    fs, path = filesystem(url, key)
    try:
        info = fs.info(path)
        if info["type"] != "directory" and not url.endswith("/"):
            _check_kind(url, info["size"], key)
            return Found([_remote_file(url, url, fs, path, info)])
        found = fs.find(path, detail=True)
        whole = {fs.unstrip_protocol(name): name for name in found if not name.endswith("/")}  # buckets may have such
        names, skipped = _choose(whole, lambda name: whole[name].removeprefix(path).strip("/"))
        for name in (whole[name] for name in names):
            if found[name].get("size") is None:  # a listing by a web server, which says more of a file by itself
                found[name] = fs.info(name)
        files = [_remote_file(url, name, fs, whole[name], found[whole[name]]) for name in sorted(names)]
    except UserError:
        raise
    except FileNotFoundError as error:
        why = f" or cannot be reached ({first_line(error.__cause__)})" if error.__cause__ else ""
        raise UserError(f"{key}: {url} does not exist{why}.") from None
    except Exception as error:  # each file system has errors of its own: no access, no network, no such bucket
        raise UserError(f"{key}: {url} cannot be listed ({first_line(error)}).") from error
    return _checked(files, skipped, url, key)


def filesystem(url: str, key: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """What fsspec reads a URL or path with, and its name there.

    Raises:
        UserError: nothing can, or not without another package; `key` says whose URL it is.
    """
    try:
        return fsspec.url_to_fs(url)
    except ImportError as error:  # it says what to install
        raise UserError(f"{key}: {url} needs a package that is not installed ({first_line(error)}).") from None
    except ValueError as error:
        known, name = fsspec.available_protocols(), url.partition("://")[0].split("::")[-1]
        hint = "" if name in known else did_you_mean(name, known)
        raise UserError(f"{key}: fsspec cannot open {url} ({first_line(error)}){hint}") from None
    except Exception as error:  # wrong or missing credentials, say
        raise UserError(f"{key}: {url} cannot be opened ({first_line(error)}).") from error


def _remote_file(url: str, name: str, filesystem: fsspec.AbstractFileSystem, path: str, info: dict) -> TextFile:
    state = [f"{key}={info[key]}" for key in _STATE if info.get(key) is not None]
    # With the URL, as files of two archives may have the same name.
    return TextFile(name, (url.rstrip("/"), name, info["size"], *state), filesystem, path)


def first_line(error: BaseException) -> str:
    """What an error says, in one line; its kind if it says nothing."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
