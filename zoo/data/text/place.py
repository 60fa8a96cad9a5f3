"""Where shards lie: in a folder, or behind a URL, where tokens are read in place, a request for each window."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, cast

import numpy as np

from kernels.errors import UserError
from zoo.data.text.files import filesystem, first_line, is_url


class Tokens(Protocol):
    """A row of numbers in a file."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def __getitem__(self, where: slice) -> np.ndarray:
        """Some of them."""
        ...


@dataclass(frozen=True)
class Place:
    """A folder of shards.

    Args:
        where: Its path, or a URL that fsspec knows, such as `s3://bucket/tokens/8d3f`.
    """

    where: str

    def __str__(self) -> str:
        return self.where

    @property
    def remote(self) -> bool:
        """Whether it lies behind a URL."""
        return is_url(self.where)

    def name_of(self, file: str) -> str:
        """The whole name of a file."""
        return f"{self.where}/{file}"

    def sizes(self) -> dict[str, int]:
        """Bytes of each file that is there now; none if there is no such folder."""
        with self._told("", "listed"):
            fs, path = filesystem(self.where, "data.shards")
            fs.invalidate_cache()  # another process may have put something there
            try:
                found = fs.ls(path, detail=True)
            except FileNotFoundError:
                return {}
            return {info["name"].rpartition("/")[2]: info["size"] for info in found if info["type"] != "directory"}

    @contextmanager
    def open(self, file: str) -> Iterator[BinaryIO]:
        """A file, to be read from its start."""
        with self._told(file, "read"):
            fs, path = filesystem(self.name_of(file), "data.shards")
            with fs.open(path, "rb") as content:
                yield content

    def array(self, file: str, dtype: str, count: int) -> Tokens:
        """The numbers in a file, of which there are so many; nothing is read yet."""
        if self.remote:
            return _Remote(self, file, np.dtype(dtype), count)
        return np.memmap(Path(self.where) / file, dtype, "r")

    def read(self, file: str, first: int, end: int) -> bytes:
        """The bytes first … end − 1 of a file."""
        with self._told(file, "read"):
            fs, path = filesystem(self.name_of(file), "data.shards")
            return cast(bytes, fs.cat_file(path, start=first, end=end))

    def put(self, local: Path) -> None:
        """Copy a file to here, under its own name."""
        with self._told(local.name, "written"):
            fs, path = filesystem(self.name_of(local.name), "data.shards")
            if fs.root_marker:  # else it has no folders, but buckets, which nobody should create by a typo
                fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            fs.put_file(str(local), path)

    @contextmanager
    def _told(self, file: str, done: str) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # each file system has errors of its own: no access, no network, no such bucket
            if not self.remote and not isinstance(error, OSError):
                raise
            name = self.name_of(file) if file else self.where
            raise UserError(f"data.shards: {name} cannot be {done} ({first_line(error)}).") from error


@dataclass(frozen=True)
class _Remote:
    """Numbers in a file behind a URL. A file system is asked for anew each time: some do not survive a fork."""

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
        found = self.place.read(self.file, first * size, end * size)
        if len(found) != (end - first) * size:
            raise UserError(f"the shard {self.place.name_of(self.file)} ends before its manifest says; it was altered.")
        return np.frombuffer(found, self.dtype)
