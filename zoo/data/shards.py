"""Token shards: the corpus tokenised once into memory-mapped files, split by document, with a manifest that is checked.

A folder holds, for each split, flat files of token ids (`train-00000.bin`, …), the positions where its documents start
(`train.starts.bin`, int64), and `manifest.json` with the size and hash of every file.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tqdm import tqdm

from kernels.errors import UserError
from zoo.data.cache import build_once, cache_folder
from zoo.data.corpus import Corpus
from zoo.data.encoding import Piece, bundles, encode_all, pieces
from zoo.data.split import SPLITS, Split, SplitByContent, content_hash
from zoo.data.tokenizer import Tokenizer

FORMAT = 1
SHARD_TOKENS = 1 << 27
CHECKED_BYTES = 1_000_000_000  # hashing this much takes about a second; more only on request


@dataclass
class Shards:
    """One split, opened: a flat array of tokens over all shard files, and where its documents start.

    Attributes:
        folder: what `prepare` returned.
        split: "train" or "validation".
        verify: hash every file; None: if they have less than 1 GB. Sizes are always compared.

    Raises:
        UserError: a file is missing, truncated or altered; the message names it.
    """

    folder: Path
    split: Split
    verify: bool | None = None
    manifest: dict = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.folder = Path(self.folder)
        self.manifest = read_manifest(self.folder)
        own = self.manifest["splits"][self.split]
        names = [*own["shards"], own["starts"]]
        sizes = [self.manifest["files"][name]["bytes"] for name in names]
        check_hash = sum(sizes) < CHECKED_BYTES if self.verify is None else self.verify
        for name in names:
            _check_file(self.folder / name, self.manifest["files"][name], check_hash)
        self._open()

    def _open(self) -> None:
        own, dtype = self.manifest["splits"][self.split], self.manifest["dtype"]
        self._shards = [np.memmap(self.folder / name, dtype, "r") for name in own["shards"]]
        self._shard_tokens = len(self._shards[0])
        self.document_starts = np.memmap(self.folder / own["starts"], np.int64, "r")

    def __getstate__(self) -> dict:  # a memory map would be pickled as its content
        return {"folder": self.folder, "split": self.split, "verify": self.verify, "manifest": self.manifest}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._open()

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
    corpus: Corpus, tokenizer: Tokenizer, validation_fraction: float = 0.05, workers: int | None = None
) -> Path:
    """Tokenise a corpus into the cache, unless that was done, and return the folder for `Shards`.

    A document goes to validation by the hash of its text, so file names and order do not matter and equal documents
    stay together; each split has at least one. A corpus of a single document is cut into a head and a tail.

    Args:
        corpus: the documents.
        tokenizer: what encodes them; its end token closes each.
        validation_fraction: the expected share of documents that are kept for validation, in (0, 1).
        workers: number of processes; None: one per CPU.

    Raises:
        UserError: the corpus cannot be read or split, or the cache cannot be written.
    """
    key = json.dumps([FORMAT, corpus.signature(), tokenizer.hash, validation_fraction])
    folder = cache_folder() / "shards" / hashlib.sha256(key.encode()).hexdigest()[:16]
    return build_once(folder, lambda new: _build(new, corpus, tokenizer, validation_fraction, workers))


def read_manifest(folder: Path) -> dict:
    """The manifest of a folder of shards. Raises UserError where it is missing, damaged or of another format."""
    file = folder / "manifest.json"
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        found = manifest["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is missing or damaged ({error}); delete {folder} to prepare it again.") from error
    if found != FORMAT:
        raise UserError(f"{file} has format {found}, this version reads {FORMAT}; delete {folder} to prepare it again.")
    return manifest


def _check_file(file: Path, expected: dict, check_hash: bool) -> None:
    again = f"delete {file.parent} to prepare it again"
    if not file.is_file():
        raise UserError(f"the shard {file} is missing; {again}.")
    if (size := file.stat().st_size) != expected["bytes"]:
        raise UserError(f"the shard {file} has {size} bytes, its manifest says {expected['bytes']}; {again}.")
    if check_hash and _file_hash(file) != expected["blake2b"]:
        raise UserError(f"the shard {file} was altered: its content does not have its manifest's hash; {again}.")


def _file_hash(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


class _Writer:
    """Appends the documents of one split to its shard files."""

    def __init__(self, folder: Path, split: Split, dtype: str) -> None:
        self._folder, self._split, self._dtype = folder, split, dtype
        self._file: BinaryIO | None = None
        self._starts = (folder / f"{split}.starts.bin").open("wb")
        self.shards: list[str] = []
        self.tokens = self.documents = 0

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
        self.shards.append(f"{self._split}-{len(self.shards):05d}.bin")
        self._file = (self._folder / self.shards[-1]).open("wb")

    def close(self) -> dict:
        for file in (self._starts, self._file):
            if file:
                file.close()
        starts = f"{self._split}.starts.bin"
        return {"shards": self.shards, "starts": starts, "tokens": self.tokens, "documents": self.documents}


def _build(folder: Path, corpus: Corpus, tokenizer: Tokenizer, fraction: float, workers: int | None) -> None:
    sides = SplitByContent(corpus, fraction)
    dtype = "<u2" if tokenizer.vocab_size < 1 << 16 else "<u4"
    writers = {split: _Writer(folder, split, dtype) for split in SPLITS}
    read_again = hashlib.sha256()

    def all_pieces() -> Iterator[Piece]:
        for text in corpus:
            read_again.update(content_hash(text).to_bytes(8))
            for split, part in sides(text):
                yield from pieces(split, part, tokenizer)

    encoded = encode_all(bundles(all_pieces()), tokenizer, workers or os.cpu_count() or 1)
    bar = tqdm(total=sides.characters, unit=" characters", unit_scale=True, desc="Tokenising", disable=None)
    with bar:  # disable=None: only on a terminal
        for bundle, ids in encoded:
            for piece, tokens in zip(bundle, ids, strict=True):
                writer = writers[piece.split]
                if piece.first:
                    writer.start_document()
                writer.append(tokens)
                if piece.last:
                    writer.append(np.array([tokenizer.eos_id], np.uint32))
                bar.update(len(piece.text))
    splits = {split: writer.close() for split, writer in writers.items()}
    if read_again.digest() != sides.digest.digest():
        raise UserError(f"{corpus} changed while it was read; start again when its files are at rest.")
    files = {f.name: {"bytes": f.stat().st_size, "blake2b": _file_hash(f)} for f in sorted(folder.glob("*.bin"))}
    identity = [FORMAT, sides.digest.hexdigest(), tokenizer.hash, fraction]
    manifest = {
        "format": FORMAT,
        "data_hash": hashlib.sha256(json.dumps(identity).encode()).hexdigest(),
        "tokenizer_hash": tokenizer.hash,
        "vocab_size": tokenizer.vocab_size,
        "validation_fraction": fraction,
        "dtype": dtype,
        "characters": sides.characters,
        "splits": splits,
        "files": files,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2), encoding="utf-8")
