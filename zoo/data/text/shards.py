"""Token shards: a corpus tokenised once into memory-mapped files, split by document, with a verified manifest.

A folder has, for each split, flat files of token ids (`train-00000.bin`, …), the positions where its documents start
(`train.starts.bin`, int64), and `manifest.json` with the size and hash of every file. It may be at a URL: then each
file is uploaded once it is full, and read in place.
"""

import hashlib
import itertools
import json
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import numpy as np

from kernels.errors import UserError
from zoo.data.text.cache import build_once, cache_folder
from zoo.data.text.corpus import Corpus
from zoo.data.text.encoding import Piece, bundles, encode_all, pieces
from zoo.data.text.place import Place, RemoteArray, is_url
from zoo.data.text.progress import PROGRESS, Progress, Record, hash_of
from zoo.data.text.split import SPLITS, Split, SplitByContent, content_hash
from zoo.data.text.tokenizer import Tokenizer
from zoo.display import SOON, progress_bar
from zoo.files.sealed_json import unsealed, write_sealed

log = logging.getLogger(__name__)

FORMAT = 1  # of the token files
MANIFEST_FORMAT = 2
CHECKED_BYTES = 1_000_000_000  # hashing them takes about a second; more are hashed only on request
MANIFEST = "manifest.json"


@dataclass
class Shards:
    """The token shards of one split, as a flat array of tokens and the starts of its documents.

    Attributes:
        folder: The folder or URL that `prepare` returned.
        split: "train", "validation", or "test" if the manifest has one.
        verify: Whether to hash every file; None: if they have less than 1 GB and are local. Sizes are always compared.

    Raises:
        UserError: A file is missing, truncated or altered; the message names it.
    """

    folder: Path | str
    split: Split
    verify: bool | None = None
    manifest: dict = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.folder = str(self.folder) if is_url(str(self.folder)) else Path(self.folder)
        self.manifest = read_manifest(self.folder)
        split, place = self.manifest["splits"][self.split], Place(str(self.folder))
        names = [*split["shards"], split["starts"]]
        size = sum(self.manifest["files"][name]["bytes"] for name in names)
        check_hash = size < CHECKED_BYTES and not place.remote if self.verify is None else self.verify
        sizes = place.sizes()
        for name in names:
            _check_size(place, name, sizes.get(name), self.manifest["files"][name])
            if check_hash:
                with place.open(name) as content:
                    _check_hash(place, name, content, self.manifest["files"][name])

    @cached_property
    def _shards(self) -> list[np.memmap | RemoteArray]:
        names, dtype = self.manifest["splits"][self.split]["shards"], self.manifest["dtype"]
        counts = [self.manifest["files"][name]["bytes"] // np.dtype(dtype).itemsize for name in names]
        place = Place(str(self.folder))
        return [place.array(name, dtype, count) for name, count in zip(names, counts, strict=True)]

    def __getstate__(self) -> dict:  # without memory maps, which would be pickled by content
        return {"folder": self.folder, "split": self.split, "verify": self.verify, "manifest": self.manifest}

    @cached_property
    def document_starts(self) -> np.memmap:
        """Positions of the first tokens of all documents, int64; fetched once if they are remote."""
        return self._positions(self.manifest["splits"][self.split]["starts"])

    def _positions(self, name: str) -> np.memmap:
        folder = self.folder
        if not isinstance(folder, Path):
            folder = build_once(_local_folder(folder), self._fetch_positions)
            self._check_copy(folder / name, Place(str(folder)))
        return np.memmap(folder / name, np.int64, "r")

    def _fetch_positions(self, folder: Path) -> None:
        place = Place(str(self.folder))
        for split in self.manifest["splits"].values():
            name = split["starts"]
            with place.open(name) as content, (folder / name).open("wb") as file:
                shutil.copyfileobj(content, file)
            self._check_copy(folder / name, place)

    def _check_copy(self, file: Path, place: Place) -> None:
        """Check the local copy of a remote file against the manifest; an error names the file in `place`."""
        expected = self.manifest["files"][file.name]
        _check_size(place, file.name, file.stat().st_size if file.is_file() else None, expected)
        with file.open("rb") as content:
            _check_hash(place, file.name, content, expected)

    def __len__(self) -> int:
        """Number of tokens."""
        return self.manifest["splits"][self.split]["tokens"]

    @property
    def num_documents(self) -> int:
        return len(self.document_starts)

    @property
    def data_hash(self) -> str:
        """A hash of the documents, their order, the tokenizer and the split, independent of the location."""
        return self.manifest["data_hash"]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start … stop − 1, as int64 `[stop − start]`."""
        parts = []
        while start < stop:
            if start >= len(self):
                raise IndexError(f"token {start} of {len(self)}")
            shard, offset = divmod(start, len(self._shards[0]))
            part = self._shards[shard][offset : offset + stop - start]
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
    validation_fraction: float | None = 0.05,
    workers: int | None = None,
    shards: str | None = None,
    test_fraction: float | None = None,
) -> Path | str:
    """Tokenise a corpus, unless it is done already.

    A hash of a document's text decides its split, so file names and order do not matter and duplicates stay together;
    training and validation have at least one document. A single document is cut into a head and a tail.
    After an interruption, tokenising continues where it was; earlier text is only read again.

    Args:
        corpus: The documents.
        tokenizer: The tokenizer; its end token closes each document, and its start token, if it has one, opens it.
        validation_fraction: The expected fraction of documents kept for validation, in (0, 1); None: all of them.
        workers: Number of processes; None: one per CPU.
        shards: The folder or URL in which each corpus has a subfolder; None: the cache. With a URL, only one file per
            split is on the local disk at a time.
        test_fraction: The expected fraction of documents kept for a test, taken from those for training; None: none.

    Returns:
        The folder or URL for `Shards`.

    Raises:
        UserError: The corpus cannot be read or split, or the token shards cannot be written.
    """
    fractions = [validation_fraction] if test_fraction is None else [validation_fraction, test_fraction]
    key = json.dumps([FORMAT, corpus.signature(), tokenizer.hash, *fractions])
    name = hashlib.sha256(key.encode()).hexdigest()[:16]
    place, location = None, "ZOO_CACHE"
    if shards is None:
        folder = cache_folder() / "shards" / name
    elif not is_url(shards):
        folder, location = Path(shards).expanduser().absolute() / name, "data.shards"
    else:
        place = Place(f"{shards.rstrip('/')}/{name}")
        folder = _local_folder(place.where)
        complete = folder.is_dir()  # checked first, since another process may complete it now
        if MANIFEST in place.sizes():
            return place.where
        if complete:  # the remote shards have been deleted since
            shutil.rmtree(folder)

    def build(new: Path) -> None:
        _build(new, corpus, tokenizer, fractions, workers, place)

    build_once(folder, build, resumable=True, key=location)
    return folder if place is None else place.where


def _local_folder(url: str) -> Path:
    """The local folder for parts of remote token shards."""
    return cache_folder() / "shards" / hashlib.sha256(url.encode()).hexdigest()[:16]


def read_manifest(folder: Path | str) -> dict:
    """The manifest of a folder of token shards.

    Raises:
        UserError: It is missing, damaged or of another format.
    """
    place = Place(str(folder))
    file, advice = place.name_of(MANIFEST), f"delete {folder} to prepare it again"
    try:
        with place.open(MANIFEST) as content:
            data = content.read()
    except UserError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise UserError(f"{file} is missing; {advice}.") from error
        raise
    manifest = unsealed(data, file, advice=advice)
    if (version := manifest.get("format")) != MANIFEST_FORMAT:
        raise UserError(f"{file} has format {version}, this version reads {MANIFEST_FORMAT}; {advice}.")
    try:
        splits = _splits(manifest.get("test_fraction"))
        consistent = all(_is_consistent(manifest, split) for split in splits) and isinstance(manifest["data_hash"], str)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{file} is damaged ({type(error).__name__}: {error}); {advice}.") from error
    if not consistent:
        raise UserError(f"{file} is damaged (its numbers contradict each other); {advice}.")
    return manifest


def _splits(test_fraction: float | None) -> tuple[Split, ...]:
    return SPLITS[:2] if test_fraction is None else SPLITS


def _is_consistent(manifest: dict, split: Split) -> bool:
    entry, sizes = manifest["splits"][split], {name: file["bytes"] for name, file in manifest["files"].items()}
    width = {"<u2": 2, "<u4": 4}[manifest["dtype"]]
    tokens = [sizes[name] / width for name in entry["shards"]]
    return (
        sum(tokens) == entry["tokens"]
        and all(count == tokens[0] for count in tokens[:-1])
        and tokens[-1:] <= tokens[:1]
        and 8 * entry["documents"] == sizes[entry["starts"]]
        and all(isinstance(file["blake2b"], str) for file in manifest["files"].values())
    )


def _check_size(place: Place, name: str, size: int | None, expected: Record) -> None:
    if size is None:
        raise UserError(f"the shard {place.name_of(name)} is missing; delete {place} to prepare it again.")
    if size != expected["bytes"]:
        raise UserError(
            f"the shard {place.name_of(name)} has {size} bytes, its manifest says {expected['bytes']}; "
            f"delete {place} to prepare it again."
        )


def _check_hash(place: Place, name: str, content: BinaryIO, expected: Record) -> None:
    if hash_of(content).hexdigest() != expected["blake2b"]:
        raise UserError(
            f"the shard {place.name_of(name)} was altered: its content does not match the hash in its manifest; "
            f"delete {place} to prepare it again."
        )


def _build(
    folder: Path,
    corpus: Corpus,
    tokenizer: Tokenizer,
    fractions: list[float | None],
    workers: int | None,
    place: Place | None,
) -> None:
    sides = SplitByContent(corpus, *fractions)
    test_fraction = fractions[1] if len(fractions) > 1 else None
    if sides.largest_token >= tokenizer.vocab_size:
        raise UserError(
            f"{corpus} has the token {sides.largest_token}, but data.tokenizer has {tokenizer.vocab_size} tokens; name "
            "the tokenizer that the files were written with."
        )
    dtype = "<u2" if tokenizer.vocab_size < 1 << 16 else "<u4"
    progress = Progress(folder, sides.digest.hexdigest(), dtype, place, _splits(test_fraction))
    read_again = hashlib.sha256()

    def all_pieces() -> Iterator[Piece]:
        for text in corpus:
            read_again.update(content_hash(text).to_bytes(8))
            for split, part in sides(text):
                yield from pieces(split, part, tokenizer)

    left = itertools.islice(all_pieces(), progress.pieces, None)
    if progress.pieces:
        log.info("%s: tokenising continues at character %d.", corpus, progress.characters)
    bar = progress_bar(
        desc="tokenising", delay=SOON, total=sides.characters, initial=progress.characters, unit=" characters"
    )
    bar.unit_scale = True
    try:
        with bar:
            for bundle, ids in encode_all(bundles(left), tokenizer, workers or os.cpu_count() or 1):
                for piece, tokens in zip(bundle, ids, strict=True):
                    writer = progress.writers[piece.split]
                    # other programs may have written the tokens around documents
                    first, last = (None, None) if isinstance(piece.text, str) else (tokens.ids[0], tokens.ids[-1])
                    if piece.first:
                        writer.start_document()
                        if tokenizer.bos_id not in (None, first):
                            writer.append(np.array([tokenizer.bos_id], np.uint32))
                    writer.append(tokens.ids)
                    if piece.last and last != tokenizer.eos_id:
                        writer.append(np.array([tokenizer.eos_id], np.uint32))
                    bar.update(len(piece.text))
                    progress.characters += len(piece.text)
                progress.pieces += len(bundle)
                progress.save()
    except KeyboardInterrupt:
        log.warning("%s: tokenising was interrupted; the next run continues it.", corpus)
        raise
    if read_again.digest() != sides.digest.digest():
        raise UserError(f"{corpus} changed while it was read; start again when its files no longer change.")
    for writer in progress.writers.values():
        writer.close()
    progress.save()
    identity = [FORMAT, sides.digest.hexdigest(), tokenizer.hash, *fractions]
    manifest = {
        "format": MANIFEST_FORMAT,
        "data_hash": hashlib.sha256(json.dumps(identity).encode()).hexdigest(),
        "tokenizer_hash": tokenizer.hash,
        "vocab_size": tokenizer.vocab_size,
        "validation_fraction": fractions[0],
        "test_fraction": test_fraction,
        "dtype": dtype,
        "characters": sides.characters,
        "splits": {split: writer.state() for split, writer in progress.writers.items()},
        "files": dict(sorted(progress.files.items())),
    }
    write_sealed(folder / MANIFEST, manifest)
    if place:
        place.put(folder / MANIFEST)  # last, since it marks the others as complete
    (folder / PROGRESS).unlink()
