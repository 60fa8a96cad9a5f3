"""Sentences that say why a config is refused: the key, the value, and what is allowed."""

import dataclasses
import inspect
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args, get_origin

import mixers
from mixers import did_you_mean
from zoo.arguments import described
from zoo.config.imports import import_module
from zoo.config.signatures import alternatives, component, is_ours, subclasses
from zoo.config.suggest import suggestions

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_OF_RUNS, _OF_SWEEPS = ("model", "data", "trainer"), ("base", "axes")


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


def wrong_value(key: str, hint: Any, value: Any) -> str:
    """The sentence for a value that does not fit the type of its key."""
    shown = repr(value) if isinstance(value, str) else json.dumps(value, default=str)
    options = [option for option in alternatives(hint) if option is not type(None)]
    if type(None) in alternatives(hint) and isinstance(value, str) and value.lower() == "none":
        return f"{key}: {shown} is text; for no value, write null"
    literals = [option for option in options if get_origin(option) is Literal]
    words = [*dict.fromkeys(str(word) for option in literals for word in get_args(option))]
    bases = [base for option in options if (base := component(option)) is not None]
    if bases and isinstance(path := value.get("class_path") if isinstance(value, dict) else value, str):
        return wrong_class(bases, path, key, words)
    if bases and value == {}:
        return f"{key}: names no class; write --{key}=CLASS"
    if bases and isinstance(value, dict):
        return f"{key}: no class is named of which {', '.join(value)} is an argument; write --{key}=CLASS before"
    kinds = [*dict.fromkeys(_in_words(option) for option in options if option not in literals)]
    if words:
        return f"{key}: {shown} is not one of {', '.join(words)}{''.join(f', nor {kind}' for kind in kinds)}"
    lonely = kinds == ["a list"] and not isinstance(value, list | dict)
    return f"{key}: {shown} is not {' or '.join(kinds)}{f', as [{value}] would be' if lonely else ''}"


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


def wrong_class(bases: list[type], path: str, key: str, words: list[str]) -> str:
    """The sentence for a path that is not a class derived from one of `bases`, nor one of the words."""
    module, _, name = path.rpartition(".")
    needed = _with_article(bases[0].__name__)
    if not module:
        return _wrong_name(bases, path, key, words)
    try:
        imported = import_module(module)
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] != module.partition(".")[0]:
            return (
                f"{key}: {path!r} cannot be imported, as it imports {error.name!r}, which is not installed; in this "
                "folder only the module that a config names is searched for, so add the folder to PYTHONPATH"
            )
        return (
            f"{key}: {path!r} cannot be imported, as there is no module {error.name!r} in this folder or "
            "installed; go to the folder that it is in, or add that to PYTHONPATH"
        )
    except Exception as error:
        return f"{key}: {path!r} cannot be imported: {described(error, module)}"
    value = getattr(imported, name, None)
    if value is None:
        classes = [name for name, each in vars(imported).items() if isinstance(each, type)]
        return f"{key}: the module {module!r} has no {name!r}{did_you_mean(name, classes)}"
    if isinstance(value, ModuleType):
        return f"{key}: {path!r} is a module; name a class in it, {path}.CLASS"
    if isinstance(value, type):
        return f"{key}: {path} is not {needed}"
    return f"{key}: {path!r} is not {needed}; write its dotted path, package.module.Class"


def _wrong_name(bases: list[type], name: str, key: str, words: list[str]) -> str:
    """As `wrong_class`, but for a name without a module."""
    base = bases[0]
    if len(classes := {cls for cls in subclasses(base) | {base} if cls.__name__ == name}) > 1:
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
    for file in sorted(path for path in Path().glob("*.py") if path.is_file() and os.access(path, os.R_OK)):
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
