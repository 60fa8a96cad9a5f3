"""A parsed config as plain containers, and back."""

import copy
import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import yaml
from jsonargparse import Namespace

from kernels import UserError
from zoo.config.parser import (
    KEYS,
    parse,
    run_parser,
)


def to_dict(config: Namespace) -> dict[str, Any]:
    """A parsed config as plain containers, from which `parse` makes it again.

    Raises:
        UserError: A value, such as the default of somebody's class, cannot be written as YAML and read back.
    """
    plain = _dumped(config)
    if (bad := next(_unwritable(plain), None)) is not None:
        raise UserError(f"{bad}; give it in the config as plain values: numbers, texts, lists and mappings")
    again = _dumped(parse(copy.deepcopy(plain)))  # the parser changes what it is given
    for key, before, now in differences(plain, again):
        raise UserError(f"{key}: {before!r} is read back from config.yaml as {now!r}; give it as plain values")
    return plain


def _dumped(config: Namespace) -> dict[str, Any]:
    known = Namespace({key: _without_instances(config[key]) for key in vars(config) if key in KEYS})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="\\s*Unable to serialize instance")  # `to_dict` says it
        return yaml.safe_load(run_parser().dump(known, skip_none=False, skip_validation=True))


def _without_instances(value: Any) -> Any:
    """Dataclass instances, as in the defaults of constructors, as their fields; the parser writes only some of them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _without_instances(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Namespace):
        return Namespace({key: _without_instances(item) for key, item in vars(value).items()})
    if isinstance(value, dict):
        return {key: _without_instances(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_instances(item) for item in value]
    return value


def _unwritable(plain: Any, key: str = "") -> Iterator[str]:
    """Where the parser wrote a remark instead of a value."""
    if isinstance(plain, dict | list):
        for name, value in plain.items() if isinstance(plain, dict) else enumerate(plain):
            yield from _unwritable(value, f"{key}.{name}".lstrip("."))
    elif isinstance(plain, str) and plain.startswith("Unable to serialize instance "):
        value = plain.removeprefix("Unable to serialize instance ")
        yield f"{key.replace('init_args.', '')}: {value} is no plain value"


def differences(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Keys at which two plain configs differ, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in [*old, *(name for name in new if name not in old)]:
            yield from differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif old != new:
        yield key, old, new
