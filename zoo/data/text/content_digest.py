"""Hashes of local text, which say whether it has changed."""

import json
from functools import lru_cache
from pathlib import Path

from zoo.data.text.cache import cache_folder
from zoo.files.atomic import atomic_write
from zoo.files.hashing import digest, file_digest

LARGE = 64 << 20  # bytes, from which hashes are kept in the cache; hashing less takes milliseconds


@lru_cache(maxsize=1 << 16)
def content_digest(path: str, state: tuple[int, ...]) -> str:
    """Return the XXH3 hash of a file, which is read again only if its state has changed.

    Args:
        path: The file.
        state: Its device, inode, size, and the times at which its content and its inode changed.
    """
    if state[2] < LARGE:
        return file_digest(path)
    record = cache_folder() / "hashes" / f"{digest(path.encode())}.json"
    try:
        cached = json.loads(record.read_bytes())
        if cached["state"] == list(state) and isinstance(cached["xxh3_128"], str):
            return cached["xxh3_128"]
    except (OSError, ValueError, LookupError, TypeError):  # none yet, or damaged
        pass
    content_hash = file_digest(path)
    try:
        with atomic_write(Path(record)) as file:
            file.write(json.dumps({"state": state, "xxh3_128": content_hash}).encode())
    except OSError:  # a cache that cannot be written; the file is read again next time
        pass
    return content_hash
