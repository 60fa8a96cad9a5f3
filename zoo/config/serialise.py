"""Resolved configs as plain containers that can be written to YAML and read back, whole or without defaults."""

from collections.abc import Mapping
from typing import Any

from jsonargparse import Namespace

from kernels import UserError
from zoo.config.imports import import_object
from zoo.config.jsonargparse_internals import entries
from zoo.config.keys import KEYS
from zoo.config.parser import run_keys
from zoo.config.resolve import Resolver


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


_ABSENT = object()


def without_defaults(config: Namespace) -> dict[str, Any]:
    """A resolved config as plain containers, without values that reading it again fills in."""
    return _different(to_dict(config), to_dict(Resolver(run_keys()).all({})))


def _different(value: Any, default: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    if isinstance(path := value.get("class_path"), str):
        defaults = plain(Resolver({}).defaults(import_object(path)), "")
        init_args = _different(value.get("init_args", {}), defaults)
        return {key: part for key, part in {**value, "init_args": init_args}.items() if part}
    defaults = default if isinstance(default, Mapping) else {}
    return {
        key: _different(part, defaults.get(key))
        for key, part in value.items()
        if key == "data" or part != defaults.get(key, _ABSENT)
    }
