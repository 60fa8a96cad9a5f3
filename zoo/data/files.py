"""The files of a corpus: found on local disks, or by fsspec behind any URL that it knows."""

import difflib
import io
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast

import fsspec

from kernels.errors import UserError
from mixers import did_you_mean

SUFFIXES = (".txt", ".jsonl", ".parquet")
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
    def suffix(self) -> str:
        """The kind of file, in small letters: `.txt`."""
        return _suffix(self.name)

    def open(self) -> BinaryIO:
        """The file, to be read from the start."""
        if self.filesystem is None:
            return Path(self.name).open("rb")
        raw = self.filesystem.open(self.path, "rb")
        return cast(BinaryIO, io.BufferedReader(raw, _READ_AHEAD))  # many of them read a line a block at a time


def find_files(path: str, key: str) -> list[TextFile]:
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


def _suffix(name: str) -> str:
    if is_url(name):  # of a chain such as zip://a.txt::s3://bucket/b.zip the first that has a path
        name = next(url for url in name.split("::") if is_url(url)).partition("://")[2].partition("?")[0]
    return PurePosixPath(name).suffix.lower()


def _local(path: Path, key: str) -> list[TextFile]:
    if path.is_dir():
        inside = sorted(f for f in path.rglob("*") if f.suffix.lower() in SUFFIXES and f.is_file())
        if not inside:
            raise UserError(f"{key}: the folder {path} has no {', '.join(SUFFIXES)} file in it.")
        return [_local_file(file) for file in inside]
    if not path.exists():
        raise UserError(f"{key}: {path} does not exist{_near_name(path)}.")
    _check_kind(str(path), path.stat().st_size, key)
    return [_local_file(path)]


def _local_file(file: Path) -> TextFile:
    return TextFile(str(file), (str(file), file.stat().st_size, file.stat().st_mtime_ns))


def _check_kind(name: str, size: int | None, key: str) -> None:
    if (suffix := _suffix(name)) not in SUFFIXES:
        raise UserError(f"{key}: {name} has the suffix {suffix!r}; a folder or {', '.join(SUFFIXES)} is needed.")
    if size == 0:  # None: a web server need not say
        raise UserError(f"{key}: {name} is empty.")


def _near_name(path: Path) -> str:
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, siblings, n=1)
    return f"; did you mean {path.parent / near[0]}?".removesuffix("?") if near else ""


def _remote(url: str, key: str) -> list[TextFile]:
    fs, path = filesystem(url, key)
    try:
        info = fs.info(path)
        if info["type"] != "directory" and not url.endswith("/"):
            _check_kind(url, info["size"], key)
            return [_remote_file(url, url, fs, path, info)]
        found = fs.find(path, detail=True)
        inside = sorted(name for name in found if _suffix(fs.unstrip_protocol(name)) in SUFFIXES)
        for name in inside:
            if found[name].get("size") is None:  # a listing by a web server, which says more of a file by itself
                found[name] = fs.info(name)
        files = [_remote_file(url, fs.unstrip_protocol(name), fs, name, found[name]) for name in inside]
    except UserError:
        raise
    except FileNotFoundError as error:
        why = f" or cannot be reached ({first_line(error.__cause__)})" if error.__cause__ else ""
        raise UserError(f"{key}: {url} does not exist{why}.") from None
    except Exception as error:  # each file system has errors of its own: no access, no network, no such bucket
        raise UserError(f"{key}: {url} cannot be listed ({first_line(error)}).") from error
    if not files:
        raise UserError(f"{key}: the folder {url} has no {', '.join(SUFFIXES)} file in it.")
    return files


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
