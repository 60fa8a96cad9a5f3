"""Files from folders that someone else may have prepared: only regular ones, and only up to a size."""

import errno
import os
import stat

from kernels.errors import UserError

KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}  # and devices


def read_regular(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """Read a file that is neither a link, which may lead out of its folder, nor a pipe or device, which may not end.

    Args:
        path: The file.
        max_bytes: Largest accepted size.

    Raises:
        UserError: The file is missing, is not a regular file, is too large or cannot be read.
    """
    try:
        # without O_NONBLOCK, opening a pipe waits for a writer
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        link = error.errno == errno.ELOOP
        raise UserError(f"{path} {'is a link' if link else f'cannot be read ({error.strerror})'}") from None
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path} is {KINDS.get(stat.S_IFMT(status.st_mode), 'a device')}, not a regular file")
        data = file.read(max_bytes + 1) if status.st_size <= max_bytes else b""
        if status.st_size > max_bytes or len(data) > max_bytes:
            raise UserError(f"{path} is larger than {max_bytes:,} bytes")
        return data
