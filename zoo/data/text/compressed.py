"""Streaming decompression of files, with errors for damage anywhere in them.

Parallel compressors write several streams or frames to a file. The libraries' file objects end silently if a later one
is damaged, so only their decompressors are used here.
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
# Exceptions for damaged or truncated data, in addition to OSError.
DAMAGED = (EOFError, zlib.error, lzma.LZMAError, zstd.ZstdError)
_BLOCK = 1 << 17  # bytes


def decompressed(raw: BinaryIO, compression: str) -> BinaryIO:
    """A file object that decompresses `raw` during reading, and closes it when it is closed.

    Raises (when read):
        OSError, or one of `DAMAGED`: The file is empty, damaged or truncated.
    """
    decompressors: dict[str, Callable[[], Any]] = {
        ".gz": _Gzip,
        ".zst": zstd.ZstdDecompressor,
        ".bz2": bz2.BZ2Decompressor,
        ".xz": lzma.LZMADecompressor,
    }
    return cast(BinaryIO, io.BufferedReader(_Streams(raw, decompressors[compression]), _BLOCK))


class _Streams(io.RawIOBase):
    """The concatenated contents of a file's compressed streams."""

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
            output = self._stream.decompress(data, len(buffer))
            if output:
                buffer[: len(output)] = output
                return len(output)


class _Gzip:
    """A gzip stream with the interface of the other decompressors."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj(16 + zlib.MAX_WBITS)  # 16 selects gzip

    @property
    def eof(self) -> bool:
        return self._stream.eof

    @property
    def unused_data(self) -> bytes:
        return self._stream.unused_data

    @property
    def needs_input(self) -> bool:
        return not self._stream.unconsumed_tail

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._stream.decompress(self._stream.unconsumed_tail + data, max_length)
