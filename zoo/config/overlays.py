"""Loading configs and overrides, which `merge.py` then merges in order."""

import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from kernels import UserError
from zoo.config.find import find_config
from zoo.config.keys import KEYS
from zoo.files.safe_yaml import parse_yaml, read_yaml

_OVERRIDE = re.compile(r"-*[\w.]+\+?=")
_SIZE = re.compile(r"(.*/)?(recipe|size)/[^/=]+")  # a config that is laid over that of a model
NULL = ("null", "~")  # YAML's words for it
Item = str | Path | Mapping[str, Any]  # a config's name or path, an override `key=value`, or a config itself


def is_override(item: Item) -> bool:
    """Return whether an item is an override `key=value` rather than a config, whose path may have a "=" as well.

    Keys of a run, and what begins with a dash, are never looked up as files.
    """
    if not isinstance(item, str) or _OVERRIDE.match(item) is None:
        return False
    return item.startswith("-") or re.split(r"[.+=]", item)[0] in KEYS or not os.path.isfile(item)


def load_items(items: Iterable[Item]) -> list[str | dict[str, Any]]:
    """Load configs into plain containers, and strip leading dashes from overrides.

    Raises:
        UserError: A config is missing, or is not a YAML mapping, or a model comes after its size.
    """
    items = [*items]
    loaded = [_override(item) if isinstance(item, str) and is_override(item) else load_config(item) for item in items]
    sizes = [number for number, item in enumerate(items) if isinstance(item, str | Path) and _SIZE.fullmatch(str(item))]
    models = [each.get("model") if isinstance(each, dict) else None for each in loaded]
    stacks = [number for number, model in enumerate(models) if isinstance(model, dict) and "stack" in model]
    for size in sizes:
        if stacks and size < stacks[0] and {*(models[size] or {})} & {*(models[stacks[0]] or {})}:
            raise UserError(f"config: {items[size]} comes before the model, which would override it; name that first")
    return loaded


def _override(item: str) -> str:
    key, _, value = item.lstrip("-").partition("=")
    if (key == "optim" and value not in NULL) or key.startswith(("optim.class_path", "optim.init_args.")):
        key = key.replace("optim", "optim.optimizer", 1)
    return f"{key}={value}"


def _with_optimizer(config: dict[str, Any]) -> dict[str, Any]:
    """A config whose `optim` may name a class, as Lightning's command line has it, instead of `optim.optimizer`."""
    optim = config.get("optim")
    if isinstance(optim, str):
        return {**config, "optim": {"optimizer": optim}}
    if not isinstance(optim, Mapping) or "class_path" not in optim or "optimizer" in optim:
        return config
    named = {key: optim[key] for key in ("class_path", "init_args") if key in optim}
    return {**config, "optim": {**{key: optim[key] for key in optim.keys() - named.keys()}, "optimizer": named}}


def load_config(item: Item) -> dict[str, Any]:
    """Load a config from a file, or take it as is if it is a mapping.

    Raises:
        UserError: The file is missing, or is not a YAML mapping.
    """
    if isinstance(item, Mapping):
        return _with_optimizer(copied(item))
    if isinstance(item, str) and item.startswith("{"):
        name, contents = "config", parse_yaml(item, "config")
    else:
        name = str(find_config(item))
        contents = read_yaml(name)
    if not isinstance(contents, dict):
        raise UserError(f"config: {name} holds no keys such as model, data or trainer")
    return _with_optimizer(contents)


def copied(part: Any) -> Any:
    """A part of a config in new dicts and lists, since the parser modifies its input."""
    if isinstance(part, Mapping):
        return {key: copied(value) for key, value in part.items()}
    return [copied(value) for value in part] if isinstance(part, list | tuple) else part


def nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def without(items: Iterable[str | dict[str, Any]], keys: Collection[str]) -> list[str | dict[str, Any]]:
    """The result of `load_items` without what it sets at or below some top-level keys."""
    rest: list[str | dict[str, Any]] = []
    for item in items:
        if not isinstance(item, str):
            rest.append({key: value for key, value in item.items() if key not in keys})
        elif re.split(r"[.+=]", item)[0] not in keys:
            rest.append(item)
    return rest


def first_name(items: Iterable[Item]) -> str | None:
    """The name of the first config file, without folder and suffix; None without one."""
    files = (item for item in items if not isinstance(item, Mapping) and not is_override(item))
    return next((Path(file).stem for file in files if not str(file).startswith("{")), None)
