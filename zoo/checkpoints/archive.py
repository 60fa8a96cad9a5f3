"""Archives of `torch.save`, sealed with a hash of their bytes."""

import os
import re
import struct
import zipfile
from typing import IO, Any, BinaryIO

import torch
import xxhash

from kernels.errors import UserError
from zoo.files.hashing import hash_of

_NAME = b"zoo:xxh3_128:"
_SEAL = re.compile(re.escape(_NAME) + rb"([0-9a-f]{32})\Z")
_LENGTH = struct.calcsize("<H")  # the length of the comment, a field before it at the end of a zip archive
_SEALED = _LENGTH + len(_NAME) + 32  # size of the seal in bytes


class _Hashing:
    """A file, open for writing, that hashes the bytes written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.hash = xxhash.xxh3_128()

    def write(self, part: bytes) -> int:
        self.hash.update(part)
        return self._file.write(part)

    def flush(self) -> None:
        self._file.flush()


def save_sealed(contents: Any, file: BinaryIO) -> None:
    """`torch.save` to an empty file, with a hash of all bytes in the comment at the end, which `torch.load` ignores.

    An OSError if the file cannot be written, for instance because the disk is full.
    """
    hashing = _Hashing(file)
    try:
        torch.save(contents, hashing)  # type: ignore[arg-type]  # torch.save only writes, and sequentially
    except RuntimeError as error:  # PyTorch complains about the position of the half-written archive
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    comment = _NAME + hashing.hash.hexdigest().encode()
    file.seek(-_LENGTH, os.SEEK_END)
    file.write(struct.pack("<H", len(comment)) + comment)


def read_seal(path: str | os.PathLike[str], file: BinaryIO) -> tuple[bool, str]:
    """Read an open file once: whether it ends with a hash of its contents, and the hash of all its bytes.

    A UserError if the hash at its end does not match. `path` is its name in messages.
    """
    hash_ = hash_of(file, os.fstat(file.fileno()).st_size - _SEALED)
    end = file.read()
    digest = hash_.copy()
    digest.update(end)
    if (seal := _SEAL.search(end)) is None:
        return False, digest.hexdigest()
    hash_.update(b"\0" * _LENGTH)  # the field's value before the comment was added
    length = struct.unpack("<H", end[:_LENGTH])
    if length != (_SEALED - _LENGTH,) or hash_.hexdigest().encode() != seal[1]:
        raise UserError(f"{path} is damaged: its bytes are not those that were written, as the hash at its end shows.")
    return True, digest.hexdigest()


def check_sums(path: str | os.PathLike[str], file: IO[bytes]) -> None:
    """Verify the checksums of the entries of an open archive without a seal; a UserError that names `path` if not."""
    with zipfile.ZipFile(file) as archive:
        if damaged := archive.testzip():
            raise UserError(f"{path} is damaged: {damaged} in it does not have its checksum.")
