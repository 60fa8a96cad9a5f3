"""Compressed files, read piece by piece, to their very end.

The libraries' own file objects end without a word where a later one of several streams or frames is damaged, as
parallel compressors write them; so only their decompressors are used here.
"""

import bz2
import io
import lzma
import sys
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO, cast

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

COMPRESSIONS = (".gz", ".zst", ".bz2", ".xz")
# What reading raises if the compressed data is damaged or not whole; and OSError.
DAMAGED = (EOFError, zlib.error, lzma.LZMAError, zstd.ZstdError)
_BLOCK = 1 << 17  # bytes


def decompressed(raw: BinaryIO, compression: str) -> BinaryIO:
    """What is in a compressed file, read as it is wanted.

    Args:
        raw: The file; it is closed with what is returned.
        compression: One of `COMPRESSIONS`.

    Raises (when read):
        OSError, or one of `DAMAGED`: the file is empty, damaged, or ends too early.
    """
    kinds: dict[str, Callable[[], Any]] = {
        ".gz": _Gzip,
        ".zst": zstd.ZstdDecompressor,
        ".bz2": bz2.BZ2Decompressor,
        ".xz": lzma.LZMADecompressor,
    }
    return cast(BinaryIO, io.BufferedReader(_Streams(raw, kinds[compression]), _BLOCK))


class _Streams(io.RawIOBase):
    """The streams of a file, one after the other."""

    def __init__(self, raw: BinaryIO, new: Callable[[], Any]) -> None:
        self._raw, self._new, self._stream = raw, new, new()

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._raw.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while True:
            data = b""
            if self._stream.eof:
                data = self._stream.unused_data.lstrip(b"\0")  # streams of .xz may be padded
                while not data:
                    block = self._raw.read(_BLOCK)
                    if not block:
                        return 0
                    data = block.lstrip(b"\0")
                self._stream = self._new()
            elif self._stream.needs_input:
                data = self._raw.read(_BLOCK)
                if not data:
                    raise EOFError("it ends before its data does")
            found = self._stream.decompress(data, len(buffer))
            if found:
                buffer[: len(found)] = found
                return len(found)


class _Gzip:
    """A stream of gzip with the interface that the decompressors of the other kinds have."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj(16 + zlib.MAX_WBITS)  # 16: of gzip

    @property
    def eof(self) -> bool:
        return self._stream.eof

    @property
    def unused_data(self) -> bytes:
        return self._stream.unused_data

    @property
    def needs_input(self) -> bool:
        return not self._stream.unconsumed_tail

    def decompress(self, data: bytes, most: int) -> bytes:
        return self._stream.decompress(self._stream.unconsumed_tail + data, most)
