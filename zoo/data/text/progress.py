"""Shard files as they grow, and how far their tokenising is: whatever it left is checked before it goes on."""

import hashlib
import logging
import os
import time
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kernels.errors import UserError
from zoo.data.text.place import Place
from zoo.data.text.split import SPLITS, Split
from zoo.files.sealed_json import read_sealed, write_sealed

log = logging.getLogger(__name__)

PROGRESS = "progress.json"
SHARD_TOKENS = 1 << 27
SAVED_EVERY = 10.0  # seconds; as much is tokenised again after an interruption
_ANEW = "its text is tokenised anew"

Record = dict[str, Any]  # of a file: its size as "bytes", and their hash as "blake2b"


def hash_of(content: Any, size: int | None = None) -> Any:
    """The running hash of an open file, or of its first `size` bytes; what is missing of these is left out."""
    found, left = hashlib.blake2b(digest_size=16), size
    while block := content.read(1 << 20 if left is None else min(left, 1 << 20)):
        found.update(block)
        left = None if left is None else left - len(block)
    return found


class AppendedFile:
    """A file that only grows, with a running hash.

    Args:
        path: The file.
        record: What `record` said at some time, to go on from there; None: it is new.

    Raises:
        UserError: the file is no longer what it was at that time.
    """

    def __init__(self, path: Path, record: Record | None = None) -> None:
        self.path, self._size, self._hash = path, 0, hashlib.blake2b(digest_size=16)
        self._file: BinaryIO
        if record is None:
            self._file = path.open("wb")
            return
        check(path, record, full=False)
        self._size = record["bytes"]
        self._file = path.open("r+b")
        self._hash = hash_of(self._file, self._size)
        self._file.truncate(self._size)
        self._file.seek(self._size)

    def write(self, data: bytes) -> None:
        """Append."""
        self._file.write(data)
        self._hash.update(data)
        self._size += len(data)

    def record(self) -> Record:
        """Size and hash of what was appended, all of which is on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return {"bytes": self._size, "blake2b": self._hash.hexdigest()}

    def close(self) -> Record:
        """The last record."""
        record = self.record()
        self._file.close()
        return record


def check(path: Path, record: Record, full: bool) -> None:
    """Raise a UserError unless a file is what its record says, or starts with that if it is not full."""
    try:
        with path.open("rb") as content:
            found = hash_of(content, None if full else record["bytes"])
    except FileNotFoundError:
        raise UserError(f"{path} is missing; {_ANEW}.") from None
    if found.hexdigest() != record["blake2b"]:
        raise UserError(f"{path} is damaged (it does not have the hash of what was written); {_ANEW}.")


class Writer:
    """Appends the documents of one split to its shard files.

    Args:
        folder: Where the files are made.
        split: Their split.
        dtype: Of a token.
        state: What `state` said at some time, to go on from there.
        records: Those of the files by then.
        full: The names of the files that were full by then.
    """

    def __init__(
        self,
        folder: Path,
        split: Split,
        dtype: str,
        state: dict | None = None,
        records: dict[str, Record] | None = None,
        full: tuple[str, ...] = (),
    ) -> None:
        self._folder, self._split, self._dtype = folder, split, dtype
        state, records = state or {"shards": [], "tokens": 0, "documents": 0}, records or {}
        self.shards: list[str] = state["shards"]
        self.tokens, self.documents = state["tokens"], state["documents"]
        self.starts = f"{split}.starts.bin"
        self.full: dict[str, Record] = {}  # those that were filled since then
        self._open = {self.starts: AppendedFile(folder / self.starts, records.get(self.starts))}
        if self.shards and self.shards[-1] not in full:
            self._open[self.shards[-1]] = AppendedFile(folder / self.shards[-1], records[self.shards[-1]])

    def state(self) -> dict:
        """What was appended."""
        return {"shards": self.shards, "starts": self.starts, "tokens": self.tokens, "documents": self.documents}

    def open_files(self) -> dict[str, Record]:
        """The records of the files that are not full."""
        return {name: file.record() for name, file in self._open.items()}

    def start_document(self) -> None:
        """What is appended next is another document."""
        self._open[self.starts].write(np.int64(self.tokens).tobytes())
        self.documents += 1

    def append(self, ids: np.ndarray) -> None:
        """More tokens of the document."""
        while len(ids):
            room = -self.tokens % SHARD_TOKENS
            if room == 0:
                self._next_shard()
                room = SHARD_TOKENS
            self._open[self.shards[-1]].write(ids[:room].astype(self._dtype).tobytes())
            self.tokens += len(ids[:room])
            ids = ids[room:]

    def _next_shard(self) -> None:
        if self.shards and self.shards[-1] in self._open:
            self._close(self.shards[-1])
        self.shards = [*self.shards, f"{self._split}-{len(self.shards):05d}.bin"]
        self._open[self.shards[-1]] = AppendedFile(self._folder / self.shards[-1])

    def close(self) -> None:
        """Nothing more will be appended."""
        for name in list(self._open):
            self._close(name)

    def _close(self, name: str) -> None:
        self.full[name] = self._open[name].close()
        del self._open[name]


class Progress:
    """How far the tokenising of a corpus is, as it is written beside its files.

    What cannot be gone on with, because it is damaged or of another text, is named in a warning and deleted.

    Args:
        folder: Where the files are made.
        digest: Of the corpus, whose text must be the same when the tokenising goes on.
        dtype: Of a token.
        place: Where full files are sent, to be deleted here; None: they stay.
    """

    def __init__(self, folder: Path, digest: str, dtype: str, place: Place | None) -> None:
        self._folder, self._place, self._of = folder, place, [digest, SHARD_TOKENS]
        self.pieces = self.characters = 0
        self.files: dict[str, Record] = {}  # the full ones
        sent = place.sizes() if place else {}
        try:
            self.writers = self._go_on(dtype, sent) if any(folder.iterdir()) else {}
        except UserError as error:
            log.warning("%s", error)
            self.writers = {}
        if not self.writers:
            self.pieces, self.characters, self.files = 0, 0, {}
            for file in folder.iterdir():
                file.unlink()
            self.writers = {split: Writer(folder, split, dtype) for split in SPLITS}
        self._saved = time.monotonic()

    def _go_on(self, dtype: str, sent: dict[str, int]) -> dict[Split, Writer]:
        state = read_sealed(self._folder / PROGRESS, advice=_ANEW)
        if state["of"] != self._of:
            raise UserError(f"{self._folder / PROGRESS} is of another text; {_ANEW}.")
        self.pieces, self.characters, self.files = state["pieces"], state["characters"], state["files"]
        for name, record in self.files.items():
            if name not in sent:
                check(self._folder / name, record, full=True)
            elif sent[name] != record["bytes"]:
                raise UserError(f"{self._place}/{name} has {sent[name]} bytes, not {record['bytes']}; {_ANEW}.")
        records, splits = {**self.files, **state["open"]}, state["splits"]
        writers = {s: Writer(self._folder, s, dtype, splits[s], records, tuple(self.files)) for s in SPLITS}
        self._delete_sent()
        return writers

    def save(self) -> None:
        """Write it, if that is due or a file is full."""
        full = {name: record for writer in self.writers.values() for name, record in writer.full.items()}
        new = [name for name in full if name not in self.files]
        if not new and time.monotonic() < self._saved + SAVED_EVERY:
            return
        for name in new:
            if self._place:
                self._place.put(self._folder / name)
            self.files[name] = full[name]
        state: dict[str, Any] = {"of": self._of, "pieces": self.pieces, "characters": self.characters}
        state["splits"] = {split: writer.state() for split, writer in self.writers.items()}
        state["open"] = {name: r for writer in self.writers.values() for name, r in writer.open_files().items()}
        write_sealed(self._folder / PROGRESS, {**state, "files": self.files})
        self._delete_sent()  # not before it is written that they are there
        self._saved = time.monotonic()

    def _delete_sent(self) -> None:
        for name in self.files if self._place else ():
            if not name.endswith(".starts.bin"):  # they are small, and wanted here as a whole
                (self._folder / name).unlink(missing_ok=True)
