"""128-bit XXH3 hashes of files.

They detect damage, not tampering, which could update the hash as well; so a cryptographic hash is not needed. On the
CPU where this was measured XXH3 reads 21 GB/s, SHA-256 1.7 (0.4 without SHA instructions), BLAKE2b 0.7: a checkpoint of
5 GB takes a quarter of a second instead of three to eight.
"""

import os
from collections.abc import Sequence
from typing import Any, BinaryIO

import xxhash

_BLOCK = 1 << 22


def digest(content: bytes) -> str:
    """The hash of some bytes, as 32 hexadecimal digits."""
    return xxhash.xxh3_128(content).hexdigest()


def file_digest(path: str | os.PathLike[str]) -> str:
    """The hash of a file, as 32 hexadecimal digits."""
    with open(path, "rb") as file:
        return hash_of(file, os.fstat(file.fileno()).st_size).hexdigest()


def combined(digests: Sequence[str]) -> str:
    """The hash of several files from those of each, in order; for one file, the hash of that file."""
    return digests[0] if len(digests) == 1 else digest("".join(digests).encode())


def hash_of(file: BinaryIO, size: int) -> Any:
    """The hash of the next `size` bytes of a file."""
    hash_ = xxhash.xxh3_128()
    while size > 0 and (block := file.read(min(size, _BLOCK))):
        hash_.update(block)
        size -= len(block)
    return hash_
