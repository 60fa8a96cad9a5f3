"""Signatures of configs: runs sign the configs they save with a key that only this user has.

A config names classes to import and files to read. A config that this user signed is trusted; any other one is foreign
and vetted first (`trust.py`).
"""

import contextlib
import hashlib
import hmac
import json
import logging
import os
import secrets
import tempfile
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

_SIZE = 32  # bytes


def sign(config: Any) -> str | None:
    """The signature of a config of plain containers; None if no key can be stored."""
    try:
        return _signature(_key(), config)
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home folder
        log.info("checkpoints are not signed, for lack of a key: %s", error)
        return None


def is_own(config: Any, signature: Any) -> bool:
    """Return whether this user signed a config."""
    try:
        key = _key_file().read_bytes()
    except (OSError, RuntimeError):
        return False
    if len(key) != _SIZE or not isinstance(signature, str) or not signature.isascii():
        return False
    return hmac.compare_digest(_signature(key, config), signature)


def _signature(key: bytes, config: Any) -> str:
    text = json.dumps(config, default=repr)
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _key_file() -> Path:
    folder = os.environ.get("XDG_CONFIG_HOME")
    return (Path(folder) if folder else Path.home() / ".config") / "token-mixer-zoo" / "key"


def _key() -> bytes:
    """The user's key, created at its first use; an OSError if that is impossible."""
    file = _key_file()
    if not file.exists():
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, new = tempfile.mkstemp(dir=file.parent)  # readable only by this user
        try:
            with open(descriptor, "wb") as opened:
                opened.write(secrets.token_bytes(_SIZE))
            with contextlib.suppress(FileExistsError):
                os.link(new, file)  # unlike a rename, this keeps a key that another process has just created
        finally:
            os.unlink(new)
    key = file.read_bytes()
    if len(key) != _SIZE:
        raise OSError(f"{file} has {len(key)} bytes instead of {_SIZE}; remove it, and a new key is created")
    return key
