"""Configs and overrides merged into one mapping, key by key, before their values are checked."""

import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from kernels import UserError
from zoo.config.overlays import nested
from zoo.files.safe_yaml import parse_yaml

log = logging.getLogger(__name__)

Settable = Callable[[str], Collection[str]]  # class path → its arguments


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


def merged(
    items: Iterable[str | Mapping[str, Any]], groups: Collection[str] = (), settable: Settable | None = None
) -> dict[str, Any]:
    """Configs and overrides `key=value` as one config, in which a class's arguments are next to its `class_path`.

    Mappings are merged key by key. A class of another name starts without arguments, except that of `data`, which
    keeps the arguments that it has as well.

    Args:
        items: The result of `load_items`.
        groups: Keys that null sets back to their defaults: what earlier items set in them is dropped.
        settable: Returns the arguments of a data class; None keeps none when the class changes.
    """
    config: dict[str, Any] = {}
    for item in items:
        overlay = _of_override(item) if isinstance(item, str) else _flat(item)
        for key, value in overlay.items():
            if key in groups and (value is None or (isinstance(value, Text) and value.is_null)):
                config.pop(key, None)
            else:
                if key == "data" and settable is not None:
                    value = _with_former_arguments(config.get(key), value, settable)
                _add(config, key, value)
    return config


def _of_override(item: str) -> dict[str, Any]:
    key, _, text = item.partition("=")
    value: Any = Text(text)
    if text.lstrip().startswith("{") and isinstance(value.parsed, Mapping):
        value = value.parsed
    return nested(re.sub(r"\.init_args\b", "", key), value)


def _flat(value: Any) -> Any:
    if isinstance(value, Mapping):
        arguments = value.get("init_args")
        flat = arguments is None or isinstance(arguments, Mapping)
        own = {str(key): _flat(part) for key, part in value.items() if not (flat and key == "init_args")}
        return own | _flat(arguments) if isinstance(arguments, Mapping) else own
    return [_flat(part) for part in value] if isinstance(value, list) else value


def _add(config: dict[str, Any], key: str, value: Any) -> None:
    """Merge one key into a config; `key+` appends to a list."""
    if key.endswith("+"):
        key = key.removesuffix("+")
        if isinstance(value, Text) and isinstance(value.parsed, list):
            value = value.parsed
        config[key] = [*_listed(config.get(key)), *_listed(value)]
    else:
        config[key] = _merged(config.get(key), value)


def _listed(value: Any) -> list[Any]:
    value = value.parsed if isinstance(value, Text) and isinstance(value.parsed, list) else value
    return [] if value is None else value if isinstance(value, list) else [value]


def _merged(old: Any, new: Any) -> Any:
    """The later of two parts of a config on top of the earlier one."""
    if isinstance(new, str) and isinstance(old, dict) and not _other_class(old, {"class_path": new}):
        return {**old, "class_path": str(new)} if "class_path" in old else new
    if not isinstance(new, dict):
        return new
    if isinstance(old, Text) and isinstance(old.parsed, list):
        old = old.parsed
    if isinstance(old, list) and old and isinstance(old[-1], dict | str) and "class_path" not in new:
        return [*old[:-1], _merged(old[-1], new)]  # as in --trainer.callbacks+=NAME --trainer.callbacks.argument=…
    if isinstance(old, str) and old and not _is_null(old):
        old = {"class_path": str(old)}
    config = dict(old) if isinstance(old, dict) and not _other_class(old, new) else {}
    for key, value in new.items():
        _add(config, key, value)
    return config


def _is_null(value: str) -> bool:
    return isinstance(value, Text) and value.is_null


def _other_class(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    paths = {str(part["class_path"]).rpartition(".")[2] for part in (old, new) if "class_path" in part}
    return len(paths) > 1


def _with_former_arguments(old: Any, new: Any, settable: Settable) -> Any:
    """A new data class with the arguments of the former one that it has as well."""
    new = {"class_path": str(new)} if isinstance(new, str) else new
    if not isinstance(old, dict) or not isinstance(new, dict) or not _other_class(old, new):
        return new
    names = settable(str(new["class_path"]))
    kept = {name: value for name, value in old.items() if name in names}
    if kept:
        shown = ", ".join(f"{name}={value}" for name, value in kept.items())
        log.info("data: %s in place of %s keeps what was set before: %s", new["class_path"], old["class_path"], shown)
    return {**kept, **new}
