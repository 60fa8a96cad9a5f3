"""Token shards: the corpus tokenised once into memory-mapped files, split by document, with a manifest that is checked.

A folder holds, for each split, flat files of token ids (`train-00000.bin`, …), the positions where its documents start
(`train.starts.bin`, int64), and `manifest.json` with the size and hash of every file. It may lie behind a URL: then
each file is sent there as soon as it is full, and read in place.
"""

import hashlib
import itertools
import json
import logging
import os
import shutil
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tqdm import tqdm

from kernels.errors import UserError
from zoo.atomic import atomic_write
from zoo.data.cache import build_once, cache_folder
from zoo.data.corpus import Corpus
from zoo.data.encoding import Piece, bundles, encode_all, pieces
from zoo.data.files import is_url
from zoo.data.place import Place
from zoo.data.split import SPLITS, Split, SplitByContent, content_hash
from zoo.data.tokenizer import Tokenizer

log = logging.getLogger(__name__)

FORMAT = 1
SHARD_TOKENS = 1 << 27
CHECKED_BYTES = 1_000_000_000  # hashing this much takes about a second; more only on request
MANIFEST, PROGRESS = "manifest.json", "progress.json"
SAVED_EVERY = 10.0  # seconds; as much is tokenised again after an interruption


@dataclass
class Shards:
    """One split, opened: a flat array of tokens over all shard files, and where its documents start.

    Attributes:
        folder: what `prepare` returned: a folder, or a URL.
        split: "train" or "validation".
        verify: hash every file; None: if they have less than 1 GB and lie in a folder. Sizes are always compared.

    Raises:
        UserError: a file is missing, truncated or altered; the message names it.
    """

    folder: Path | str
    split: Split
    verify: bool | None = None
    manifest: dict = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.folder = str(self.folder) if is_url(str(self.folder)) else Path(self.folder)
        self.manifest = read_manifest(self.folder)
        own, place = self.manifest["splits"][self.split], Place(str(self.folder))
        names = [*own["shards"], own["starts"]]
        sizes = [self.manifest["files"][name]["bytes"] for name in names]
        check_hash = sum(sizes) < CHECKED_BYTES and not place.remote if self.verify is None else self.verify
        found = place.sizes()
        for name in names:
            _check_file(place, name, found.get(name), self.manifest["files"][name], check_hash)
        self._open()

    def _open(self) -> None:
        own, dtype, place = self.manifest["splits"][self.split], self.manifest["dtype"], Place(str(self.folder))
        counts = [self.manifest["files"][name]["bytes"] // np.dtype(dtype).itemsize for name in own["shards"]]
        self._shards = [place.array(name, dtype, count) for name, count in zip(own["shards"], counts, strict=True)]
        self._shard_tokens = counts[0]
        self._starts: np.memmap | None = None

    def __getstate__(self) -> dict:  # a memory map would be pickled as its content
        return {"folder": self.folder, "split": self.split, "verify": self.verify, "manifest": self.manifest}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._open()

    @property
    def document_starts(self) -> np.memmap:
        """Positions of the first tokens of all documents, int64; from behind a URL they are fetched once."""
        if self._starts is None:
            folder = self.folder if isinstance(self.folder, Path) else _own_folder(self.folder)
            build_once(folder, self._fetch_starts)
            self._starts = np.memmap(folder / self.manifest["splits"][self.split]["starts"], np.int64, "r")
        return self._starts

    def _fetch_starts(self, folder: Path) -> None:
        for split in SPLITS:
            name = self.manifest["splits"][split]["starts"]
            with Place(str(self.folder)).open(name) as content, (folder / name).open("wb") as file:
                shutil.copyfileobj(content, file)

    def __len__(self) -> int:
        """Number of tokens."""
        return self.manifest["splits"][self.split]["tokens"]

    @property
    def num_documents(self) -> int:
        return len(self.document_starts)

    @property
    def data_hash(self) -> str:
        """Equal for equal documents in equal order, tokenizer and split, wherever they lie."""
        return self.manifest["data_hash"]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start … stop − 1, as int64 `[stop − start]`."""
        parts = []
        while start < stop:
            shard, offset = divmod(start, self._shard_tokens)
            part = self._shards[shard][offset : offset + stop - start]
            if not len(part):
                raise IndexError(f"token {start} of {len(self)}")
            parts.append(part)
            start += len(part)
        return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)

    def starts_in(self, start: int, stop: int) -> np.ndarray:
        """Positions in [start, stop) at which a document starts, int64."""
        low, high = np.searchsorted(self.document_starts, [start, stop])
        return np.asarray(self.document_starts[low:high])


def prepare(
    corpus: Corpus,
    tokenizer: Tokenizer,
    validation_fraction: float = 0.05,
    workers: int | None = None,
    shards: str | None = None,
) -> Path | str:
    """Tokenise a corpus, unless that was done, and return the folder or URL for `Shards`.

    A document goes to validation by the hash of its text, so file names and order do not matter and equal documents
    stay together; each split has at least one. A corpus of a single document is cut into a head and a tail. After an
    interruption it goes on where it was; the text before is only read again.

    Args:
        corpus: the documents.
        tokenizer: what encodes them; its end token closes each, and its start token, if it has one, opens it.
        validation_fraction: the expected share of documents that are kept for validation, in (0, 1).
        workers: number of processes; None: one per CPU.
        shards: the folder or URL that holds the shards of each corpus in a folder of its own; None: the cache. Behind a
            URL they take no room here but for one file of each split at a time.

    Raises:
        UserError: the corpus cannot be read or split, or the shards cannot be written.
    """
    key = json.dumps([FORMAT, corpus.signature(), tokenizer.hash, validation_fraction])
    name = hashlib.sha256(key.encode()).hexdigest()[:16]
    if shards is None or not is_url(shards):
        root = cache_folder() / "shards" if shards is None else Path(shards).expanduser().absolute()
        return build_once(
            root / name,
            lambda new: _build(new, corpus, tokenizer, validation_fraction, workers, None),
            resumable=True,
            key="ZOO_CACHE" if shards is None else "data.shards",
        )
    place = Place(f"{shards.rstrip('/')}/{name}")
    own = _own_folder(place.where)
    complete = own.is_dir()  # asked first: another process may complete it now
    if MANIFEST not in place.sizes():
        if complete:  # and what it was made for has been deleted
            shutil.rmtree(own)
        build_once(
            own,
            lambda new: _build(new, corpus, tokenizer, validation_fraction, workers, place),
            resumable=True,
        )
    return place.where


def _own_folder(url: str) -> Path:
    """Where something of the shards behind a URL is kept here."""
    return cache_folder() / "shards" / hashlib.sha256(url.encode()).hexdigest()[:16]


def read_manifest(folder: Path | str) -> dict:
    """The manifest of a folder of shards. Raises UserError where it is missing, damaged or of another format."""
    place = Place(str(folder))
    file, again = place.name_of(MANIFEST), f"delete {folder} to prepare it again"
    try:
        with place.open(MANIFEST) as content:
            manifest = json.loads(content.read().decode())
        found = manifest["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is missing or damaged ({error}); {again}.") from error
    if found != FORMAT:
        raise UserError(f"{file} has format {found}, this version reads {FORMAT}; {again}.")
    return manifest


def _check_file(place: Place, name: str, size: int | None, expected: dict, check_hash: bool) -> None:
    file, again = place.name_of(name), f"delete {place} to prepare it again"
    if size is None:
        raise UserError(f"the shard {file} is missing; {again}.")
    if size != expected["bytes"]:
        raise UserError(f"the shard {file} has {size} bytes, its manifest says {expected['bytes']}; {again}.")
    if check_hash:
        with place.open(name) as content:
            if _hash(content) != expected["blake2b"]:
                raise UserError(
                    f"the shard {file} was altered: its content does not have its manifest's hash; {again}."
                )


def _hash(content: Any) -> str:
    found = hashlib.blake2b(digest_size=16)
    while block := content.read(1 << 20):
        found.update(block)
    return found.hexdigest()


class _Writer:
    """Appends the documents of one split to its shard files.

    Args:
        folder: Where the files are made.
        split: Their split.
        dtype: Of a token.
        state: What `state` said at some time, to go on from there.
        full: The files that were full by then.
    """

    def __init__(
        self, folder: Path, split: Split, dtype: str, state: dict | None = None, full: Collection[str] = ()
    ) -> None:
        self._folder, self._split, self._dtype = folder, split, dtype
        self._file: BinaryIO | None = None
        state = state or {"shards": [], "tokens": 0, "documents": 0}
        self.shards: list[str] = state["shards"]
        self.tokens, self.documents = state["tokens"], state["documents"]
        self.starts = f"{split}.starts.bin"
        self._starts = self._at(self.starts, self.documents * np.dtype(np.int64).itemsize)
        if self.shards and self.shards[-1] not in full:
            before = (len(self.shards) - 1) * SHARD_TOKENS
            self._file = self._at(self.shards[-1], (self.tokens - before) * np.dtype(dtype).itemsize)

    def _at(self, name: str, size: int) -> BinaryIO:
        file = (self._folder / name).open("r+b" if size else "wb")
        file.truncate(size)
        file.seek(size)
        return file

    def state(self) -> dict:
        """What was appended, all of it in its files."""
        for file in (self._starts, self._file):
            if file and not file.closed:
                file.flush()
                os.fsync(file.fileno())
        return {"shards": self.shards, "starts": self.starts, "tokens": self.tokens, "documents": self.documents}

    def full(self) -> list[str]:
        """The files to which nothing more will be appended."""
        open_one = [] if self._file is None or self._file.closed else self.shards[-1:]
        return [name for name in self.shards if name not in open_one] + ([self.starts] if self._starts.closed else [])

    def start_document(self) -> None:
        self._starts.write(np.int64(self.tokens).tobytes())
        self.documents += 1

    def append(self, ids: np.ndarray) -> None:
        while len(ids):
            room = -self.tokens % SHARD_TOKENS
            if room == 0:
                self._next_shard()
                room = SHARD_TOKENS
            assert self._file is not None
            self._file.write(ids[:room].astype(self._dtype).tobytes())
            self.tokens += len(ids[:room])
            ids = ids[room:]

    def _next_shard(self) -> None:
        if self._file:
            self._file.close()
        self.shards = [*self.shards, f"{self._split}-{len(self.shards):05d}.bin"]
        self._file = self._at(self.shards[-1], 0)

    def close(self) -> None:
        for file in (self._starts, self._file):
            if file:
                file.close()


class _Progress:
    """How far the tokenising of a corpus is, as it is written beside its files.

    Args:
        folder: Where the files are made.
        digest: Of the corpus, whose text must be the same when the tokenising goes on.
        dtype: Of a token.
        place: Where full files are sent, to be deleted here; None: they stay.
    """

    def __init__(self, folder: Path, digest: str, dtype: str, place: Place | None) -> None:
        self._folder, self._place, self._of = folder, place, [digest, SHARD_TOKENS]
        state: dict[str, Any] = {"of": self._of, "pieces": 0, "characters": 0, "splits": {}, "files": {}}
        if (folder / PROGRESS).is_file():
            found = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
            state = found if found["of"] == self._of else state
        self.pieces, self.characters, self.files = state["pieces"], state["characters"], state["files"]
        if not self.pieces:  # what lies there is of no use
            for file in folder.iterdir():
                file.unlink()
        if place:
            self._delete_sent()
        self.writers = {s: _Writer(folder, s, dtype, state["splits"].get(s), self.files) for s in SPLITS}
        self._saved = time.monotonic()

    def save(self) -> None:
        """Write it, if that is due, with the size and hash of each file that is full."""
        full = [name for writer in self.writers.values() for name in writer.full() if name not in self.files]
        if not full and time.monotonic() < self._saved + SAVED_EVERY:
            return
        splits = {split: writer.state() for split, writer in self.writers.items()}
        for name in full:
            file = self._folder / name
            with file.open("rb") as content:
                self.files[name] = {"bytes": file.stat().st_size, "blake2b": _hash(content)}
            if self._place:
                self._place.put(file)
        state = {"of": self._of, "pieces": self.pieces, "characters": self.characters}
        with atomic_write(self._folder / PROGRESS) as written:
            written.write(json.dumps({**state, "splits": splits, "files": self.files}).encode())
        if self._place:  # not before it is written that they are there
            self._delete_sent()
        self._saved = time.monotonic()

    def _delete_sent(self) -> None:
        for name in self.files:
            if not name.endswith(".starts.bin"):  # they are small, and wanted here as a whole
                (self._folder / name).unlink(missing_ok=True)


def _build(
    folder: Path, corpus: Corpus, tokenizer: Tokenizer, fraction: float, workers: int | None, place: Place | None
) -> None:
    sides = SplitByContent(corpus, fraction)
    dtype = "<u2" if tokenizer.vocab_size < 1 << 16 else "<u4"
    progress = _Progress(folder, sides.digest.hexdigest(), dtype, place)
    read_again = hashlib.sha256()

    def all_pieces() -> Iterator[Piece]:
        for text in corpus:
            read_again.update(content_hash(text).to_bytes(8))
            for split, part in sides(text):
                yield from pieces(split, part, tokenizer)

    left = itertools.islice(all_pieces(), progress.pieces, None)
    if progress.pieces:
        log.info("%s: going on with the tokenising at character %d.", corpus, progress.characters)
    bar = tqdm(desc="Tokenising", total=sides.characters, initial=progress.characters, unit=" characters", disable=None)
    bar.unit_scale = True
    try:
        with bar:  # disable=None: only on a terminal
            for bundle, ids in encode_all(bundles(left), tokenizer, workers or os.cpu_count() or 1):
                for piece, tokens in zip(bundle, ids, strict=True):
                    writer = progress.writers[piece.split]
                    if piece.first:
                        writer.start_document()
                        if tokenizer.bos_id is not None:
                            writer.append(np.array([tokenizer.bos_id], np.uint32))
                    writer.append(tokens)
                    if piece.last:
                        writer.append(np.array([tokenizer.eos_id], np.uint32))
                    bar.update(len(piece.text))
                    progress.characters += len(piece.text)
                progress.pieces += len(bundle)
                progress.save()
    except KeyboardInterrupt:
        log.warning("%s: tokenising was interrupted; the next run goes on with it.", corpus)
        raise
    if read_again.digest() != sides.digest.digest():
        raise UserError(f"{corpus} changed while it was read; start again when its files are at rest.")
    for writer in progress.writers.values():
        writer.close()
    progress.save()
    identity = [FORMAT, sides.digest.hexdigest(), tokenizer.hash, fraction]
    manifest = {
        "format": FORMAT,
        "data_hash": hashlib.sha256(json.dumps(identity).encode()).hexdigest(),
        "tokenizer_hash": tokenizer.hash,
        "vocab_size": tokenizer.vocab_size,
        "validation_fraction": fraction,
        "dtype": dtype,
        "characters": sides.characters,
        "splits": {split: writer.state() for split, writer in progress.writers.items()},
        "files": dict(sorted(progress.files.items())),
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
    if place:
        place.put(folder / MANIFEST)  # the last one: with it, the others are complete
    (folder / PROGRESS).unlink()
