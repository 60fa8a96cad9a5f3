"""Archives of `torch.save`: sealed with a hash of their bytes, and checked to be no larger unpacked than packed."""

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
_HEADER = 30  # bytes before an entry's name


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


def check_archive(path: str | os.PathLike[str], contents: bool, file: IO[bytes] | None = None) -> None:
    """Check that a file, or what is open as `file`, is an archive as `torch.save` writes it, before an entry is read.

    Its entries must be uncompressed and must not overlap, so that reading them takes no more memory than the file.
    With `contents`, their checksums are verified as well.
    """
    try:
        with zipfile.ZipFile(path if file is None else file) as archive:
            assert archive.fp is not None
            size = archive.fp.seek(0, os.SEEK_END)
            entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
            ends = [*(entry.header_offset for entry in entries[1:]), size]
            for entry, end in zip(entries, ends, strict=True):
                earliest_end = entry.header_offset + _HEADER + len(entry.orig_filename) + entry.compress_size
                if (
                    entry.compress_type != zipfile.ZIP_STORED
                    or entry.file_size != entry.compress_size
                    or earliest_end > end
                    or (entry.filename.endswith("data.pkl") and b"bytearray" in archive.read(entry))
                ):
                    raise UserError(f"{path} is refused: {entry.filename} in it unpacks to more than the file holds.")
            if len({entry.filename for entry in entries}) < len(entries):
                raise UserError(f"{path} is refused: several of its entries have the same name.")
            damaged = archive.testzip() if contents else None
    except (UserError, PermissionError):
        raise
    except Exception as error:  # zipfile raises many types for damaged files
        raise UserError(f"{path} is truncated or not a checkpoint of this project.") from error
    if damaged is not None:
        raise UserError(f"{path} is damaged: {damaged} in it does not have its checksum.")
