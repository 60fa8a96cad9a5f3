"""Parsed configs as plain containers that can be written to YAML and read back."""

import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

from jsonargparse import Namespace

from kernels import UserError
from zoo.config.keys import KEYS, OF_LIGHTNING
from zoo.config.parser import UNSEEN, parse, parse_model, run_parser
from zoo.files.safe_yaml import load_quickly


def to_dict(config: Namespace) -> dict[str, Any]:
    """A parsed config as plain containers, from which `parse` restores it. What is to be written is `verified`.

    Raises:
        UserError: A value, such as the default of a foreign class, cannot be written as YAML.
    """
    run_keys = Namespace({key: _without_instances(config[key]) for key in vars(config) if key in KEYS})
    parser = run_parser() if {*OF_LIGHTNING} & {*vars(run_keys)} else run_parser(lightning=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="\\s*Unable to serialize instance")  # reported below
        plain = load_quickly(parser.dump(run_keys, UNSEEN, skip_none=False, skip_validation=True))
    if (problem := next(_unwritable(plain), None)) is not None:
        raise UserError(f"{problem}; give it in the config as plain values: numbers, strings, lists and mappings")
    return plain


def verified(config: Namespace) -> dict[str, Any]:
    """A parsed config as plain containers that are read back as they are, to be written to a file.

    Raises:
        UserError: A value cannot be written as YAML, or is read back as another.
    """
    plain = to_dict(config)
    parse_again = parse if plain.keys() & {*OF_LIGHTNING} else parse_model
    parsed = parse_again(plain)
    if all(_without_instances(parsed.get(key)) == _without_instances(config.get(key)) for key in KEYS):
        return plain  # the text of equal values is equal
    for key, before, now in differences(plain, to_dict(parsed)):
        raise UserError(f"{key}: {before!r} is read back from config.yaml as {now!r}; give it as plain values")
    return plain


def _without_instances(value: Any) -> Any:
    """Replace dataclass instances, as in defaults of constructors, by dicts of their fields; the parser omits some."""
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
    """A message for each value in whose place the parser wrote that it cannot serialise it."""
    if isinstance(plain, dict | list):
        for name, value in plain.items() if isinstance(plain, dict) else enumerate(plain):
            yield from _unwritable(value, f"{key}.{name}".lstrip("."))
    elif isinstance(plain, str) and plain.startswith("Unable to serialize instance "):
        value = plain.removeprefix("Unable to serialize instance ")
        yield f"{key.replace('init_args.', '')}: {value} is not a plain value"


def differences(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The keys at which two plain configs differ, each with the old and the new value."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in [*old, *(name for name in new if name not in old)]:
            yield from differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif old != new:
        yield key, old, new
