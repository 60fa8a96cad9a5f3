"""Explains in one sentence why a config is refused: the key, the value, and what is allowed.

Keys are checked against the signatures of constructors before the parser reads a config. What the parser then refuses
is found by trying each value alone for the type of its key.
"""

import dataclasses
import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args, get_origin

import mixers
from kernels import UserError
from mixers import did_you_mean
from zoo.config.overlays import nested
from zoo.config.signatures import (
    absent_by_default,
    alternatives,
    component,
    constructor,
    hints,
    is_ours,
    passed_by_position,
    required,
    settable,
    subclasses,
    takes_any_name,
)
from zoo.config.suggest import suggestions
from zoo.files.safe_yaml import parse_yaml

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_NUMBERS = (int, float, bool)
_OF_CLASSES = ("class_path", "dict_kwargs")  # keys next to the arguments of a class
_OF_RUNS, _OF_SWEEPS = ("model", "data", "trainer"), ("base", "axes")


def merged(items: Iterable[str | Mapping[str, Any]]) -> dict[str, Any]:
    """Configs and overrides `key=value` as one config, in which a class's arguments are next to its `class_path`."""
    config: Any = {}
    for item in items:
        if not isinstance(item, str):
            config = _merged(config, _flat(item))
        elif not item.partition("=")[0].endswith(".help"):
            config = _merged(config, _override(item))
    return config


def _override(item: str) -> Any:
    key, _, text = item.partition("=")
    try:
        value = _flat(parse_yaml(text, key)) if text else text  # the parser reads nothing as text, YAML as null
    except UserError:
        value = text
    value = [value] if key.endswith("+") and not isinstance(value, list) else value
    return nested(re.sub(r"\.init_args\b", "", key.removesuffix("+")), value)


def _flat(value: Any) -> Any:
    if isinstance(value, Mapping):
        arguments = value.get("init_args")
        own = {str(key): _flat(part) for key, part in value.items() if key != "init_args"}
        return own | _flat(arguments) if isinstance(arguments, Mapping) else own
    return [_flat(part) for part in value] if isinstance(value, list) else value


def _merged(old: Any, new: Any) -> Any:
    """The later of two parts of a config on top of the earlier one; another class starts without arguments."""
    if isinstance(new, str) and isinstance(old, dict) and "class_path" in old:
        new = {"class_path": new}
    if not isinstance(new, dict):
        return new
    old = {"class_path": old} if isinstance(old, str) else old if isinstance(old, dict) else {}
    paths = (str(part.get("class_path")).rpartition(".")[2] for part in (old, old | new))
    old = old if len({*paths}) == 1 else {}
    return {**old, **{key: _merged(old.get(key), value) for key, value in new.items()}}


class Explainer:
    """Finds what is wrong with a config.

    Args:
        types: The parser's keys, such as `model.hidden_size`, and their types.
        config: The result of `merged`.
    """

    def __init__(self, types: Mapping[str, Any], config: Mapping[str, Any]):
        self._types = types
        self.keys = {*types}  # with those of the classes in the config
        self._unknown: list[tuple[str, str, Any]] = []  # keys, the part of each that exists, and its class
        self._suspects: list[str | tuple[str, Any, Any]] = []  # sentences; or keys with their types and values
        self._nulls: list[tuple[str, Any]] = []  # keys that are null and must not be, and their types
        self._present: set[str] = set()
        self._group(config, "")

    def _group(self, config: Mapping[str, Any], group: str) -> None:
        for name, value in config.items():
            key = group + name
            self._present.add(key)
            if key in self._types:
                self._part_or_null(self._types[key], value, key)
            elif not any(option.startswith(f"{key}.") for option in self._types):
                while isinstance(value, dict) and len(value) == 1:  # the whole key, as in an override
                    ((part, value),) = value.items()
                    key += f".{part}"
                self._unknown.append((key, group.rstrip("."), None))
            elif isinstance(value, dict):
                self._group(value, f"{key}.")
            elif value is not None:
                self._suspects.append((key, dict, value))

    def _part_or_null(self, hint: Any, value: Any, key: str) -> None:
        """As `_part`, but the parser takes null for any type."""
        group = "." not in key  # which may be null
        if value is None and all(each in _NUMBERS or (_is_own_part(each) and not group) for each in alternatives(hint)):
            self._nulls.append((key, hint))
        self._part(hint, value, key)

    def _part(self, hint: Any, value: Any, key: str) -> None:
        for option in alternatives(hint):
            base, origin, inner = component(option), get_origin(option), get_args(option)
            if dataclasses.is_dataclass(option) and isinstance(value, dict):
                self._arguments(option, 0, value, key)
                return
            if base is not None and isinstance(value, dict | str):
                if _path(value) is None and constructor(base) is object.__init__:
                    self._suspects.append(missing(key))
                elif (cls := _class(_path(value), base)) is not None:
                    arguments = value if isinstance(value, dict) else {}
                    self._arguments(cls, passed_by_position(option), arguments, key)
                    return
            if inspect.isclass(origin) and issubclass(origin, Iterable) and inner[-1:] != (...,):
                parts = value if isinstance(value, list) else [*value.values()] if isinstance(value, dict) else []
                if issubclass(origin, Mapping) == isinstance(value, dict):
                    for part in parts:
                        self._part(inner[-1], part, key)
        self._suspects.append((key, hint, value))

    def _arguments(self, cls: Any, by_position: int, arguments: Mapping[str, Any], key: str) -> None:
        parameters, types, optional = settable(cls, by_position), hints(cls), absent_by_default(cls)
        self.keys |= {f"{key}.{name}" for name in parameters}
        for name, value in arguments.items():
            if name in parameters:
                part = self._part if name in optional else self._part_or_null
                part(types.get(name), value, f"{key}.{name}")
            elif name not in _OF_CLASSES and not takes_any_name(cls):
                self._unknown.append((f"{key}.{name}", key, cls))
        if absent := [name for name in required(cls, by_position) if name not in arguments]:
            self._suspects.append(f"{key}: {cls.__name__} needs a value for {', '.join(absent)}, under init_args")

    def check_keys(self) -> None:
        """Raise a UserError about the first key that does not exist, or that is null and must not be."""
        for key, group, cls in self._unknown:
            if _is_without_matrix(cls) and key.rpartition(".")[2] in settable(mixers.Expanded):
                raise UserError(f"{key}: {cls.__name__} has no matrix state to expand")
            raise UserError(unknown(key, group, self.keys))
        for key, hint in self._nulls:
            raise UserError(_wrong_value(key, hint, None))

    def mistake(self, fits: Callable[[Any, Any], bool], required_keys: Iterable[str]) -> str | None:
        """A sentence about the first mistake in values, classes or missing arguments; None if none is found.

        Args:
            fits: Returns whether the parser takes a value for a type.
            required_keys: The keys that a config must have.
        """
        for suspect in self._suspects:
            if isinstance(suspect, str):
                return suspect
            key, hint, value = suspect
            if not fits(hint, value):
                return _wrong_value(key, hint, value)
        for key in required_keys:
            if key not in self._present:
                return missing(key)
        # for a component, the parser takes any function at first
        for key, hint, value in (suspect for suspect in self._suspects if not isinstance(suspect, str)):
            if any(map(component, alternatives(hint))) and isinstance(_path(value), str):
                return _wrong_value(key, hint, value)
        return None


def _path(value: Any) -> Any:
    return value.get("class_path") if isinstance(value, dict) else value


def _class(path: Any, base: type) -> type | None:
    """The class at a path, if it is certain and derives from `base`."""
    if not isinstance(path, str):
        return None
    module, _, name = path.rpartition(".")
    if not module:
        classes = _classes(name, base)
        return classes.pop() if len(classes) == 1 else None
    try:
        cls = getattr(importlib.import_module(module), name)
    except Exception:  # the parser meets it again, and says so
        return None
    return cls if isinstance(cls, type) and issubclass(cls, base) else None


def _classes(name: str, base: type) -> set[type]:
    return {cls for cls in subclasses(base) | {base} if cls.__name__ == name}


def _is_without_matrix(cls: Any) -> bool:
    return isinstance(cls, type) and issubclass(cls, mixers.TokenMixer) and not issubclass(cls, mixers.LinearMixer)


def unknown(key: str, group: str, keys: Iterable[str]) -> str:
    """The sentence for a key that does not exist.

    Args:
        key: The key.
        group: The part of it that exists; empty for the top level.
        keys: All keys that exist.
    """
    keys, start = {*keys}, f"{group}." if group else ""
    siblings = sorted({other.removeprefix(start).partition(".")[0] for other in keys if other.startswith(start)})
    if key == "optim.optimizer.lr":
        return f"{key}: set optim.learning_rate instead"
    if key in _OF_SWEEPS:
        return f"{key}: a key of sweeps, not of runs; this config is for python cli.py sweep --config FILE"
    if key.split(".")[0] in _OF_RUNS and {*_OF_SWEEPS} <= keys:
        return f"{key}: a key of runs, not of sweeps; name the config of a run as the base of a sweep (tutorial 06)"
    if close := suggestions(key, group, keys):
        short = (other.removeprefix(start) if other.rpartition(".")[0] == group else other for other in close)
        return f"{key}: unknown key; did you mean {' or '.join(map(repr, short))}?"
    allowed = f" (allowed: {', '.join(siblings)})" if 0 < len(siblings) <= 20 else " (--help lists them)"
    return f"{key}: unknown key{allowed if siblings else ''}"


def missing(key: str) -> str:
    """The sentence for a key without which nothing can be done."""
    advice = {
        "model.stack": "give a config with a model, such as --config gdn_h2.yaml",
        "checkpoint": "write --checkpoint runs/NAME",
    }
    return f"{key}: missing; {advice.get(key, f'write --{key}=VALUE')}"


def _wrong_value(key: str, hint: Any, value: Any) -> str:
    """The sentence for a value that does not fit the type of its key."""
    shown = repr(value) if isinstance(value, str) else json.dumps(value, default=str)
    options = [option for option in alternatives(hint) if option is not type(None)]
    if type(None) in alternatives(hint) and isinstance(value, str) and value.lower() == "none":
        return f"{key}: {shown} is text; for no value, write null"
    literals = [option for option in options if get_origin(option) is Literal]
    words = [*dict.fromkeys(str(word) for option in literals for word in get_args(option))]
    bases = [base for option in options if (base := component(option)) is not None]
    if bases and isinstance(path := _path(value), str):
        return _wrong_class(bases, path, key, words)
    if bases and isinstance(value, dict):
        return f"{key}: no class is named of which {', '.join(value)} is an argument; write --{key}=CLASS before"
    kinds = [*dict.fromkeys(_in_words(option) for option in options if option not in literals)]
    if words:
        return f"{key}: {shown} is not one of {', '.join(words)}{''.join(f', nor {kind}' for kind in kinds)}"
    lonely = kinds == ["a list"] and not isinstance(value, list | dict)
    return f"{key}: {shown} is not {' or '.join(kinds)}{f', as [{value}] would be' if lonely else ''}"


def _is_own_part(hint: Any) -> bool:
    """Return whether a type is a component of this project, or a group of its arguments."""
    part = hint if dataclasses.is_dataclass(hint) else component(hint)
    return isinstance(part, type) and is_ours(part)


def _in_words(hint: Any) -> str:
    origin = get_origin(hint) or hint
    if (base := component(hint)) is not None:
        return _with_article(base.__name__)
    if origin in _WORDS or not isinstance(origin, type):
        return _WORDS.get(origin, "such a value")
    if issubclass(origin, Mapping) or dataclasses.is_dataclass(origin):
        return "a mapping"
    if issubclass(origin, tuple) and get_args(hint)[-1:] != (...,):
        return f"a list of {len(get_args(hint))}"
    return "a list" if issubclass(origin, Iterable) else _with_article(origin.__name__)


def _wrong_class(bases: list[type], path: str, key: str, words: list[str]) -> str:
    """The sentence for a path that is not a class derived from one of `bases`, nor one of the words."""
    module, _, name = path.rpartition(".")
    needed = _with_article(bases[0].__name__)
    if not module:
        return _wrong_name(bases, path, key, words)
    try:
        imported = importlib.import_module(module)
        value = getattr(imported, name)
    except ModuleNotFoundError as error:
        return (
            f"{key}: {path!r} cannot be imported, as there is no module {error.name!r} in this folder or "
            "installed; go to the folder that it is in, or add that to PYTHONPATH"
        )
    except ImportError as error:
        return f"{key}: {path!r} cannot be imported: {error}"
    except AttributeError:
        classes = [name for name, each in vars(imported).items() if isinstance(each, type)]
        return f"{key}: the module {module!r} has no {name!r}{did_you_mean(name, classes)}"
    if isinstance(value, ModuleType):
        return f"{key}: {path!r} is a module; name a class in it, {path}.CLASS"
    if isinstance(value, type):
        return f"{key}: {path} is not {needed}"
    return f"{key}: {path!r} is not {needed}; write its dotted path, package.module.Class"


def _wrong_name(bases: list[type], name: str, key: str, words: list[str]) -> str:
    """As `_wrong_class`, but for a name without a module."""
    base = bases[0]
    if len(classes := _classes(name, base)) > 1:
        paths = ", ".join(sorted(f"{cls.__module__}.{cls.__name__}" for cls in classes))
        return f"{key}: {name} is the name of several classes; write one of {paths}"
    fitting = sorted(
        {cls.__name__ for each in bases for cls in subclasses(each) or {each} if not inspect.isabstract(cls)}
    )
    if name in mixers.names() or any(cls.__name__ == name for cls in subclasses(base.__mro__[-2])):
        purpose = re.split(r"[.:]", inspect.getdoc(base) or "")[0]
        start = f"{key}: {name} does not fit here, where {_with_article(base.__name__)} is needed"
        return f"{start} ({purpose}): one of {', '.join(fitting)}" if is_ours(base) else start
    if Path(f"{name}.py").is_file():
        return f"{key}: {name!r} is a module; name a class in it, {name}.CLASS"
    for file in sorted(Path().glob("*.py")):
        if re.search(rf"^class {re.escape(name)}\b", file.read_text(errors="replace"), re.MULTILINE):
            return f"{key}: {name} is in {file}, which is not imported; write {file.stem}.{name}"
    kind = base.__name__ if is_ours(base) else "class"
    start = f"{key}: {name!r} is not " + (f"one of {', '.join(words)}, nor " if words else "") + f"a known {kind}"
    choices = f" (known: {', '.join(fitting)}; or a dotted path)" if is_ours(base) else ""
    return start + (
        did_you_mean(name, [*words, *fitting]) or choices or "; write its dotted path, package.module.Class"
    )


def _with_article(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"
