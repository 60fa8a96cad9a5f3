"""Documents from flat token files of other tools: Megatron-LM and datatrove.

| tool | tokens | where documents end |
|---|---|---|
| Megatron-LM, NeMo | `x.bin` | `x.idx` |
| datatrove | `x.ds` | `x.ds.index`; `x.ds.metadata` has the bytes per token |

All numbers are little-endian. Tokens are memory-mapped, so files may be larger than memory.
"""

import itertools
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kernels.errors import UserError
from zoo.data.text.documents import Tokens

SUFFIXES = (".bin", ".ds", ".idx")  # the last without its .bin is a mistake to report
_MEGATRON = struct.Struct("<9sQBQQ")  # magic, version, dtype, number of sequences, number of document bounds
_MAGIC = b"MMIDIDX\0\0"
_MEGATRON_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_DATATROVE_WIDTHS = {2: "<u2", 4: "<u4"}


class _File(NamedTuple):
    """The tokens of a file, and where in them each document ends, `[n]` int64."""

    tokens: np.ndarray
    ends: np.ndarray


def companions(name: str, exists: Callable[[str], bool]) -> list[str]:
    """The names of the files that describe a file of tokens, without those that do not exist."""
    stem, _, suffix = name.rpartition(".")
    names = {"bin": [f"{stem}.idx"], "ds": [f"{name}.index", f"{name}.metadata"]}
    return [each for each in names.get(suffix.lower(), ()) if exists(each)]


def token_documents(path: Path) -> Iterator[Tokens]:
    """Yield the documents of a `.bin` or `.ds` file.

    Raises:
        UserError: The file that describes it is missing, one of them is truncated or damaged, or what it holds are not
            token ids.
    """
    if path.suffix.lower() == ".idx":
        raise UserError(f"{path} has no tokens: {path.stem}.bin is missing.")
    if path.suffix.lower() == ".ds":
        file = _datatrove(path)
    elif path.with_suffix(".idx").is_file():
        file = _megatron(path, path.with_suffix(".idx"))
    else:
        raise UserError(f"{path} has no index: {path.stem}.idx (Megatron) is needed.")
    for number, (start, end) in enumerate(itertools.pairwise([0, *file.ends.tolist()]), start=1):
        ids = file.tokens[start:end]
        if outside := [int(each) for each in (ids.min(initial=0), ids.max(initial=0)) if not 0 <= each < 1 << 32]:
            raise UserError(f"{path}, document {number}, has the number {outside[0]}, which is not a token.")
        yield Tokens(ids.astype(np.uint32))


def _megatron(path: Path, index: Path) -> _File:
    content = _bytes(index)
    header = _MEGATRON.unpack(content[: _MEGATRON.size].tobytes()) if len(content) >= _MEGATRON.size else (b"",)
    if header[0] != _MAGIC:
        raise UserError(f"{index} is not an index of Megatron (it does not begin with MMIDIDX).")
    _, version, code, sequences, bounds = header
    if version != 1:
        raise UserError(f"{index} has the version {version}; 1 can be read.")
    if code not in _MEGATRON_DTYPES:
        raise UserError(f"{index} has the dtype {code}, which is not one of integers: {[*_MEGATRON_DTYPES]}.")
    # some versions end with a byte per sequence, its mode
    expected = _MEGATRON.size + 12 * sequences + 8 * bounds
    if len(content) not in (expected, expected + sequences):
        raise UserError(f"{index} is truncated or damaged: it has {len(content)} bytes, its header says {expected}.")
    first_pointer, first_bound = _MEGATRON.size + 4 * sequences, _MEGATRON.size + 12 * sequences
    lengths = content[_MEGATRON.size : first_pointer].view("<i4")
    pointers = content[first_pointer:first_bound].view("<i8")
    documents = content[first_bound:expected].view("<i8")
    dtype = np.dtype(_MEGATRON_DTYPES[code])
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if (lengths < 0).any() or not np.array_equal(pointers, ends[:-1] * dtype.itemsize):
        raise UserError(f"{index} is damaged: its sequences do not follow each other.")
    if not bounds or documents[0] != 0 or documents[-1] != sequences or (np.diff(documents) < 0).any():
        raise UserError(f"{index} is damaged: its documents do not cover its {sequences} sequences.")
    return _one_after_another(path, dtype, ends[documents[1:]], index)


def _datatrove(path: Path) -> _File:
    index, metadata = path.with_name(f"{path.name}.index"), path.with_name(f"{path.name}.metadata")
    if not index.is_file():
        raise UserError(f"{path} has no index: {index.name} is needed.")
    content, size = _bytes(index), path.stat().st_size
    if not len(content) or len(content) % 8:
        raise UserError(f"{index} is truncated: it has {len(content)} bytes, not 8 for each document.")
    ends = content.view("<u8").astype(np.int64)
    if (np.diff(ends, prepend=0) < 0).any():
        raise UserError(f"{index} is damaged: its documents do not follow each other.")
    count = int(ends[-1])
    width = size // max(count, 1)
    if metadata.is_file():
        named = metadata.read_text(encoding="utf-8", errors="replace").partition("\n")[0].rpartition("|")[2]
        width = int(named) if named in ("2", "4") else width  # files of older versions do not name it
    if width not in _DATATROVE_WIDTHS or size != count * width:
        raise UserError(f"{path} is truncated or damaged: it has {size} bytes, {index.name} says {count} tokens.")
    if (mask := path.with_name(f"{path.name}.loss")).is_file():
        raise UserError(
            f"{mask} excludes tokens from the loss, which is not supported; move it to train on all tokens."
        )
    return _one_after_another(path, np.dtype(_DATATROVE_WIDTHS[width]), ends, index)


def _one_after_another(path: Path, dtype: np.dtype, ends: np.ndarray, index: Path) -> _File:
    """A file of documents that end at these tokens, whose number is compared with that in its index."""
    count = int(ends[-1]) if len(ends) else 0
    if (size := path.stat().st_size) != count * dtype.itemsize:
        raise UserError(
            f"{path} is truncated or damaged: it has {size} bytes, {index.name} says {count} tokens of {dtype.name}."
        )
    return _File(_bytes(path).view(dtype), ends)


def _bytes(path: Path) -> np.ndarray:
    """A memory-mapped file, [bytes] uint8."""
    return np.asarray(np.memmap(path, np.uint8, "r")) if path.stat().st_size else np.empty(0, np.uint8)
