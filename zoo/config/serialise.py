"""Resolved configs as plain containers that can be written to YAML and read back."""

from typing import Any

from jsonargparse import Namespace

from kernels import UserError
from zoo.config.jsonargparse_internals import entries
from zoo.config.keys import KEYS


def to_dict(config: Namespace) -> dict[str, Any]:
    """A resolved config as plain containers, from which `parse` restores it.

    Raises:
        UserError: A value cannot be written as YAML.
    """
    return {key: plain(value, key) for key, value in entries(config) if key in KEYS}


def plain(value: Any, key: str) -> Any:
    """A value of a resolved config as plain containers; `key` is for messages."""
    if isinstance(value, Namespace | dict):
        items = entries(value) if isinstance(value, Namespace) else value.items()
        return {name: plain(part, f"{key}.{name}") for name, part in items}
    if isinstance(value, list | tuple):
        return [plain(part, key) for part in value]
    if value is None or isinstance(value, str | int | float):
        return value
    raise UserError(
        f"{key.replace('.init_args', '')}: {value!r} is not a plain value; give it in the config as plain values: "
        "numbers, strings, lists and mappings"
    )
