"""Writing token shards, with progress saved so that tokenising can continue after an interruption."""

import hashlib
import logging
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kernels.errors import UserError
from zoo.data.text.place import Place
from zoo.data.text.split import SPLITS, Split
from zoo.files.links import open_in_place
from zoo.files.sealed_json import read_sealed, write_sealed

log = logging.getLogger(__name__)

PROGRESS = "progress.json"
SHARD_TOKENS = 1 << 27
SAVED_EVERY = 10.0  # seconds; an interruption costs this much, at most
_TOKENS = rf"({'|'.join(SPLITS)})(-[0-9]{{5,}}|\.starts)\.bin"
_WRITTEN = re.compile(rf"{_TOKENS}|manifest\.json|{re.escape(PROGRESS)}")
_AGAIN = "its text is tokenised again"

Record = dict[str, Any]  # of a file: its size as "bytes", and its hash as "blake2b"


def hash_of(content: Any, size: int | None = None) -> Any:
    """The running hash of an open file, or of its first `size` bytes, or fewer if it is shorter."""
    running, left = hashlib.blake2b(digest_size=16), size
    while block := content.read(1 << 20 if left is None else min(left, 1 << 20)):
        running.update(block)
        left = None if left is None else left - len(block)
    return running


class AppendedFile:
    """A file to append to, with a running hash; with an earlier `record` it continues from there.

    Raises:
        UserError: The file has changed since.
    """

    def __init__(self, path: Path, record: Record | None = None) -> None:
        self.path, self._size, self._hash = path, 0, hashlib.blake2b(digest_size=16)
        self._file: BinaryIO
        if record is None:
            self._file = open_in_place(path, "wb")
            return
        check(path, record, full=False)
        self._size = record["bytes"]
        self._file = open_in_place(path, "r+b")
        self._hash = hash_of(self._file, self._size)
        self._file.truncate(self._size)
        self._file.seek(self._size)

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._hash.update(data)
        self._size += len(data)

    def record(self) -> Record:
        """Sync the file to disk, and return its size and hash."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return {"bytes": self._size, "blake2b": self._hash.hexdigest()}

    def close(self) -> Record:
        record = self.record()
        self._file.close()
        return record


def check(path: Path, record: Record, full: bool) -> None:
    """Raise a UserError if a file is missing or differs from its record, of the full file or else of its beginning."""
    try:
        with path.open("rb") as content:
            actual = hash_of(content, None if full else record["bytes"])
    except FileNotFoundError:
        raise UserError(f"{path} is missing; {_AGAIN}.") from None
    if actual.hexdigest() != record["blake2b"]:
        raise UserError(f"{path} is damaged (it does not match the hash of what was written); {_AGAIN}.")


class Writer:
    """Appends the documents of one split to its token shards.

    Args:
        folder: The folder of the files.
        split: The split.
        dtype: The dtype of the tokens.
        saved: What `Progress.save` wrote, to continue from there.
    """

    def __init__(self, folder: Path, split: Split, dtype: str, saved: dict[str, Any] | None = None) -> None:
        self._folder, self._split, self._dtype = folder, split, dtype
        state: dict[str, Any] = saved["splits"][split] if saved else {"shards": [], "tokens": 0, "documents": 0}
        self.shards: list[str] = state["shards"]
        self.tokens, self.documents = state["tokens"], state["documents"]
        self.starts = f"{split}.starts.bin"
        self.full: dict[str, Record] = {}  # filled since then
        records: dict[str, Record | None] = saved["open"] if saved else {self.starts: None}
        names = [name for name in (self.starts, *self.shards[-1:]) if name in records]
        self._open = {name: AppendedFile(folder / name, records[name]) for name in names}

    def state(self) -> dict:
        """The names of the files, and the number of tokens and documents so far."""
        return {"shards": self.shards, "starts": self.starts, "tokens": self.tokens, "documents": self.documents}

    def open_files(self) -> dict[str, Record]:
        """The records of the files that are not full."""
        return {name: file.record() for name, file in self._open.items()}

    def start_document(self) -> None:
        self._open[self.starts].write(np.int64(self.tokens).tobytes())
        self.documents += 1

    def append(self, ids: np.ndarray) -> None:
        """Append tokens `[n]` to the document."""
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
        for name in list(self._open):
            self._close(name)

    def _close(self, name: str) -> None:
        self.full[name] = self._open[name].close()
        del self._open[name]


class Progress:
    """The progress of tokenising a corpus, saved in the folder of its token shards.

    If earlier progress cannot be continued, because it is damaged or of other text, it is deleted with a warning.

    Args:
        folder: The folder of the files.
        digest: Digest of the corpus, whose text must be the same to continue.
        dtype: The dtype of the tokens.
        place: Where to move full files; None: they stay.
        splits: The splits that are written.
    """

    def __init__(self, folder: Path, digest: str, dtype: str, place: Place | None, splits: Sequence[Split]) -> None:
        self._splits = splits
        self._folder, self._place, self._of = folder, place, [digest, SHARD_TOKENS]
        self.pieces = self.characters = 0
        self.files: dict[str, Record] = {}  # full files
        self.writers: dict[Split, Writer] = {}
        try:
            if any(folder.iterdir()):
                self.writers = self._continued(dtype, place.sizes() if place else {})
        except UserError as error:
            log.warning("%s", error)
        if not self.writers:
            self.pieces, self.characters, self.files = 0, 0, {}
            for file in folder.iterdir():
                if _WRITTEN.fullmatch(file.name):
                    file.unlink()
            self.writers = {split: Writer(folder, split, dtype) for split in splits}
        self._saved = time.monotonic()

    def _continued(self, dtype: str, sent: dict[str, int]) -> dict[Split, Writer]:
        state = read_sealed(self._folder / PROGRESS, advice=_AGAIN)
        if state["of"] != self._of:
            raise UserError(f"{self._folder / PROGRESS} is of other text; {_AGAIN}.")
        self.pieces, self.characters, self.files = state["pieces"], state["characters"], state["files"]
        for name, record in self.files.items():
            if name not in sent:
                check(self._folder / name, record, full=True)
            elif sent[name] != record["bytes"]:
                raise UserError(f"{self._place}/{name} has {sent[name]} bytes, not {record['bytes']}; {_AGAIN}.")
        names = [*self.files, *state["open"], *(name for s in self._splits for name in state["splits"][s]["shards"])]
        if any(Path(name).name != name for name in names):
            raise UserError(f"{self._folder / PROGRESS} names a file outside its folder; {_AGAIN}.")
        writers = {split: Writer(self._folder, split, dtype, state) for split in self._splits}
        self._delete_sent()
        return writers

    def save(self) -> None:
        """Save the progress, if that is due or a file is full."""
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
        self._delete_sent()  # only after the record that they were sent is saved
        self._saved = time.monotonic()

    def _delete_sent(self) -> None:
        for name in self.files if self._place else ():
            if not name.endswith(".starts.bin"):  # which is small, and needed locally
                (self._folder / name).unlink(missing_ok=True)
