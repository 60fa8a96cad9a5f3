"""The location of token shards: a folder, or a URL from which tokens are read in place, one request per window."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import fsspec
import numpy as np

from kernels.errors import UserError
from zoo.arguments import first_line


def is_url(path: str) -> bool:
    """Return whether a path is a URL, to be opened by fsspec."""
    return "://" in path


@dataclass(frozen=True)
class Place:
    """A folder of token shards, local or remote.

    Args:
        where: Its path, or a URL that fsspec knows, such as `s3://bucket/tokens/8d3f`.
    """

    where: str

    def __str__(self) -> str:
        return self.where

    @property
    def remote(self) -> bool:
        """Return whether it is at a URL."""
        return is_url(self.where)

    def name_of(self, file: str) -> str:
        """The full path or URL of a file."""
        return f"{self.where}/{file}"

    def sizes(self) -> dict[str, int]:
        """File name → size in bytes, for all files there now; empty if the folder does not exist."""
        with self._filesystem("", "listed") as (fs, path):
            fs.invalidate_cache()  # another process may have added files
            try:
                infos = fs.ls(path, detail=True)
            except FileNotFoundError:
                return {}
            return {info["name"].rpartition("/")[2]: info["size"] for info in infos if info["type"] != "directory"}

    @contextmanager
    def open(self, file: str) -> Iterator[BinaryIO]:
        """Open a file for reading."""
        with self._filesystem(file, "read") as (fs, path), fs.open(path, "rb") as content:
            yield content

    def array(self, file: str, dtype: str, count: int) -> "np.memmap | RemoteArray":
        """The array of `count` numbers in a file; nothing is read yet."""
        if self.remote:
            return RemoteArray(self, file, np.dtype(dtype), count)
        return np.memmap(Path(self.where) / file, dtype, "r")

    def read(self, file: str, first: int, end: int) -> bytes:
        """The bytes first … end − 1 of a file."""
        with self._filesystem(file, "read") as (fs, path):
            return cast(bytes, fs.cat_file(path, start=first, end=end))

    def put(self, local: Path) -> None:
        """Copy a local file to this place, under the same name."""
        with self._filesystem(local.name, "written") as (fs, path):
            if fs.root_marker:  # otherwise it has buckets, which a typo should not create
                fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            fs.put_file(str(local), path)

    @contextmanager
    def _filesystem(self, file: str, action: str) -> Iterator[tuple[fsspec.AbstractFileSystem, str]]:
        """The file system and the path there of a file, or of the folder if its name is empty.

        Errors in the block become a UserError: the file cannot be `action`, such as "read".
        """
        name = self.name_of(file) if file else self.where
        try:
            yield fsspec.url_to_fs(name)
        except UserError:
            raise
        except Exception as error:  # file systems raise exceptions of any type: no access, no network, no bucket
            if not self.remote and not isinstance(error, OSError):
                raise
            raise UserError(f"data.shards: {name} cannot be {action} ({first_line(error)}).") from error


@dataclass(frozen=True)
class RemoteArray:
    """An array in a file at a URL. Each access opens the file system again, since some do not survive a fork."""

    place: Place
    file: str
    dtype: np.dtype
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, where: slice) -> np.ndarray:
        first, end, _ = where.indices(self.count)
        if first >= end:
            return np.empty(0, self.dtype)
        size = self.dtype.itemsize
        content = self.place.read(self.file, first * size, end * size)
        if len(content) != (end - first) * size:
            raise UserError(f"the shard {self.place.name_of(self.file)} ends before its manifest says; it was altered.")
        return np.frombuffer(content, self.dtype)
