"""Configs and overrides merged into one mapping, key by key, before their values are checked."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kernels import UserError
from zoo.config.overlays import nested
from zoo.files.safe_yaml import parse_yaml

_CLASS = re.compile(r"(\w+\.)*[A-Z]\w*")  # the name of a class, with or without its module


class Text(str):
    """The value of an override `key=value`, of which only the type of its key says whether it is text or YAML."""

    @property
    def parsed(self) -> Any:
        """The text read as YAML; the text itself where it is empty or is not YAML."""
        try:
            value = parse_yaml(str(self), "value") if self else ""
        except UserError:
            return str(self)
        return str(self) if value is None and not self.is_null else _flat(value)  # null: an anchor or a comment

    @property
    def is_null(self) -> bool:
        """Return whether the text is one of YAML's words for no value."""
        return self.strip() in ("null", "Null", "NULL", "~")


class Append(str):
    """The name of a list to which the value behind it is appended, written `name+`."""


@dataclass(frozen=True)
class Former:
    """An argument of a class that was replaced by another one, which takes it over if it fits.

    Attributes:
        value: The argument.
        class_path: The former class.
    """

    value: Any
    class_path: str


def merged(items: Iterable[str | Mapping[str, Any]], groups: Collection[str] = ()) -> dict[str, Any]:
    """Configs and overrides `key=value` as one config, in which a class's arguments are next to its `class_path`.

    Mappings are merged key by key. In `model`, a class of another name starts without arguments; elsewhere it takes
    over those that fit (`Former`).

    Args:
        items: The result of `load_items`.
        groups: Keys that null sets back to their defaults: what earlier items set in them is dropped. A key `name+` in
            them appends to a list.
    """
    config: dict[str, Any] = {}
    for item in items:
        overlay = _of_override(item) if isinstance(item, str) else _flat(item)
        for key, value in overlay.items():
            if key in groups and (value is None or (isinstance(value, Text) and value.is_null)):
                config.pop(key, None)
                continue
            if key in groups and isinstance(value, dict):
                value = {Append(name[:-1]) if name.endswith("+") else name: part for name, part in value.items()}
            _add(config, key, value, takes_over=key != "model")
    return config


def _of_override(item: str) -> dict[str, Any]:
    key, _, text = item.partition("=")
    value: Any = Text(text)
    if text.lstrip().startswith("{") and isinstance(value.parsed, Mapping):
        value = value.parsed
    *above, name = re.sub(r"\.init_args\b", "", key).split(".")
    overlay = {Append(name[:-1]) if name.endswith("+") else name: value}
    return nested(".".join(above), overlay) if above else overlay


def _flat(value: Any) -> Any:
    if isinstance(value, Mapping):
        arguments = value.get("init_args")
        flat = arguments is None or isinstance(arguments, Mapping)
        own = {str(key): _flat(part) for key, part in value.items() if not (flat and key == "init_args")}
        return own | _flat(arguments) if isinstance(arguments, Mapping) else own
    return [_flat(part) for part in value] if isinstance(value, list) else value


def _add(config: dict[str, Any], key: str, value: Any, takes_over: bool) -> None:
    """Merge one key into a config."""
    if isinstance(key, Append):
        config[str(key)] = [*_listed(config.get(key)), *_listed(value)]
    else:
        config[key] = _merged(config.get(key), value, takes_over)


def _listed(value: Any) -> list[Any]:
    value = value.value if isinstance(value, Former) else value
    value = value.parsed if isinstance(value, Text) and isinstance(value.parsed, list) else value
    return [] if value is None else value if isinstance(value, list) else [value]


def _merged(old: Any, new: Any, takes_over: bool) -> Any:
    """The later of two parts of a config on top of the earlier one."""
    old = old.value if isinstance(old, Former) else old
    if isinstance(new, str) and isinstance(old, dict) and "class_path" in old and not _other_class(old, new):
        return {**old, "class_path": str(new)}
    if isinstance(new, str) and isinstance(old, dict) and takes_over and _CLASS.fullmatch(new):
        new = {"class_path": str(new)}
    if not isinstance(new, dict):
        return new
    if isinstance(old, Text) and isinstance(old.parsed, list):
        old = old.parsed
    if isinstance(old, list) and old and isinstance(old[-1], dict | str) and "class_path" not in new:
        # as in --trainer.callbacks+=NAME --trainer.callbacks.argument=…
        return [*old[:-1], _merged(old[-1], new, takes_over)]
    if isinstance(old, str) and old and not (isinstance(old, Text) and old.is_null):
        old = {"class_path": str(old)}
    config = dict(old) if isinstance(old, dict) else {}
    if "class_path" in new and _other_class(config, str(new["class_path"])):
        path = str(config.pop("class_path"))
        config = {
            name: part if isinstance(part, Former) else Former(part, path)
            for name, part in config.items()
            if takes_over and name != "dict_kwargs"
        }
    for key, value in new.items():
        _add(config, key, value, takes_over)
    return config


def _other_class(config: Mapping[str, Any], path: str) -> bool:
    named = str(config.get("class_path", path))
    return named.rpartition(".")[2] != path.rpartition(".")[2]
