"""Documents from token files of other tools: Megatron-LM, datatrove and litdata.

| tool | tokens | where documents end |
|---|---|---|
| Megatron-LM, NeMo | `x.bin` | `x.idx` |
| datatrove | `x.ds` | `x.ds.index`; `x.ds.metadata` has the bytes per token |
| litdata | `chunk-0-0.bin` | the header of the chunk; `index.json` has the dtype and all chunks |

All numbers are little-endian. Tokens are memory-mapped, so files may be larger than memory.
"""

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kernels.errors import UserError
from zoo.data.text.documents import Tokens

SUFFIXES = (".bin", ".ds", ".idx")  # the last without its .bin is a mistake to report
LITDATA_INDEX = "index.json"
_MEGATRON = struct.Struct("<9sQBQQ")  # magic, version, dtype, number of sequences, number of document bounds
_MAGIC = b"MMIDIDX\0\0"
_MEGATRON_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_TORCH_DTYPES = {11: "<u1", 12: "<i1", 13: "<i2", 14: "<i2", 15: "<i4", 16: "<i4", 17: "<i8", 18: "<i8", 20: "<u2"}
_NUMPY_DTYPES = {0: "<i1", 1: "<i2", 2: "<i4", 3: "<i8", 4: "<u1", 5: "<u2", 6: "<u4", 7: "<u8"}
_LITDATA_DTYPES = {"no_header_tensor": _TORCH_DTYPES, "no_header_numpy": _NUMPY_DTYPES}
_DATATROVE_WIDTHS = {2: "<u2", 4: "<u4"}


class _File(NamedTuple):
    """The bytes of a file `[size]` uint8, and where in it each document starts and ends, `[n]` int64 each."""

    content: np.ndarray
    dtype: np.dtype
    starts: np.ndarray
    ends: np.ndarray


def companions(name: str, exists: Callable[[str], bool]) -> list[str]:
    """The names of the files that describe a file of tokens, without those that do not exist."""
    stem, _, suffix = name.rpartition(".")
    folder = name[: name.rfind("/") + 1]
    names = {"bin": [f"{stem}.idx", f"{folder}{LITDATA_INDEX}"], "ds": [f"{name}.index", f"{name}.metadata"]}
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
    elif (index := path.with_name(LITDATA_INDEX)).is_file():
        file = _litdata(path, index)
    else:
        raise UserError(f"{path} has no index: {path.stem}.idx (Megatron) or {LITDATA_INDEX} (litdata) is needed.")
    for number, (start, end) in enumerate(zip(file.starts.tolist(), file.ends.tolist(), strict=True), start=1):
        ids = file.content[start:end].view(file.dtype)
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


def _litdata(path: Path, index: Path) -> _File:
    content = _bytes(path)
    config, chunks = _litdata_index(index)
    formats = config.get("data_format")
    name, _, code = str(formats[0] if isinstance(formats, list) and len(formats) == 1 else None).partition(":")
    dtypes = _LITDATA_DTYPES.get(name, {})
    if not code.isdecimal() or int(code) not in dtypes:
        raise UserError(f"{index} describes {formats}; one vector of integers for each document can be read.")
    if packed := [key for key in ("compression", "encryption") if config.get(key) is not None]:
        raise UserError(f"{index} has {packed[0]} {config[packed[0]]!r:.40}; only plain chunks can be read.")
    if path.name not in chunks:
        raise UserError(f"{path} is not among the chunks of {index}.")
    if missing := [each for each in chunks if not path.with_name(each).is_file()]:
        raise UserError(f"{index} lists {missing[0]}, which is missing.")
    documents = int(content[:4].view("<u4")[0]) if len(content) >= 4 else -1
    header, dtype = 4 * (documents + 2), np.dtype(dtypes[int(code)])
    offsets = content[4:header].view("<u4").astype(np.int64) if documents >= 0 and header <= len(content) else None
    if offsets is None or documents != chunks[path.name] or offsets[0] != header or offsets[-1] != len(content):
        raise UserError(f"{path} is truncated or damaged: {index.name} says {chunks[path.name]} documents.")
    # the size of each item of a PyTreeLoader comes before it
    starts, ends = offsets[:-1] + (4 if config.get("item_loader") == "PyTreeLoader" else 0), offsets[1:]
    if (ends < starts).any() or ((ends - starts) % dtype.itemsize).any():
        raise UserError(f"{path} is damaged: its documents are not vectors of {dtype.name}.")
    return _File(content, dtype, starts, ends)


def _litdata_index(index: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The config of a folder of litdata, and the number of documents in each chunk."""
    try:
        content = json.loads(index.read_bytes())
        chunks = {chunk["filename"]: chunk["chunk_size"] for chunk in content["chunks"]}
        config = content["config"]
    except (ValueError, RecursionError, LookupError, TypeError) as error:
        raise UserError(f"{index} is not an index of litdata ({type(error).__name__}: {error}).") from None
    if not isinstance(config, dict) or any(Path(str(name)).name != name for name in chunks):
        raise UserError(f"{index} is not an index of litdata.")
    return config, chunks


def _one_after_another(path: Path, dtype: np.dtype, ends: np.ndarray, index: Path) -> _File:
    """A file of documents that end at these tokens, whose number is compared with that in its index."""
    count = int(ends[-1]) if len(ends) else 0
    if (size := path.stat().st_size) != count * dtype.itemsize:
        raise UserError(
            f"{path} is truncated or damaged: it has {size} bytes, {index.name} says {count} tokens of {dtype.name}."
        )
    ends = ends * dtype.itemsize
    return _File(_bytes(path), dtype, np.concatenate([[0], ends])[:-1], ends)


def _bytes(path: Path) -> np.ndarray:
    """A memory-mapped file, [bytes] uint8."""
    return np.asarray(np.memmap(path, np.uint8, "r")) if path.stat().st_size else np.empty(0, np.uint8)
