"""A resolved config without what is the default anyway."""

from collections.abc import Mapping
from typing import Any

from jsonargparse import Namespace

from zoo.config.imports import import_object
from zoo.config.parser import run_keys
from zoo.config.resolve import Resolver
from zoo.config.serialise import plain, to_dict

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
