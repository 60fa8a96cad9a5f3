"""Turns the parser's nested messages about a mistake in a config into one clear sentence.

It reads the messages of jsonargparse 4.53; `tests/test_cli.py` has a mistake of each form, and fails if one changes.
"""

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterable
from typing import Any, get_args

from mixers import did_you_mean
from zoo.config.components import component, hints, is_ours, settable, subclasses

KEYS = re.compile(r'Parser key "([\w.]+)"')
ENCLOSING = re.compile(r"given class_path '([\w.]+)'")  # outermost first
GIVEN = re.compile(r"class_path='([\w.]+)'")  # innermost first
NUMBERS = {"int": "a whole number", "float": "a number", "bool": "true or false"}  # in words


def explain(message: str, options: Iterable[str]) -> str:
    """The parser's message as one sentence: the key, the value, and what is allowed.

    Args:
        message: The message of jsonargparse.
        options: All option names of the parser, such as ``model.hidden_size``.

    Returns:
        One line. An unrecognised message is returned with its line breaks removed.
    """
    keys = KEYS.findall(message)
    hidden = {"help", "print_config", "print_shtab"}
    option_names = sorted(option for option in set(options) - hidden if not option.endswith("+"))
    key = ".".join(part.removeprefix("init_args.") for part in keys)
    paths = [*GIVEN.findall(message), *reversed(ENCLOSING.findall(message))]
    owner = _owner(paths, keys[-1].removeprefix("model.").partition(".")[0] if keys else None)

    if match := re.search(r"Expected a dot import path string: (\S+?)\.?(?: Got value|\s|$)", message):
        unknown_class = _unknown_class(key, match[1], owner, keys[-1] if keys else key)
        choices = ", ".join(re.findall(r"Expected a typing\.Literal\[(.*?)\]", message)).replace("'", "")
        return unknown_class.replace(" is not a", f" is not one of {choices}, nor a", 1) if choices else unknown_class
    if match := re.search(r"No module named '([\w.]+)'\. Got value: (?:Namespace\(class_path=')?([\w.]+\w)", message):
        return (
            f"{key}: {match[2]!r} cannot be imported, as there is no module {match[1]!r} in this folder or installed; "
            "go to the folder that it is in, or add that to PYTHONPATH"
        )
    if match := re.search(r"No module named '([\w.]+)'", message):
        return f"{key}: there is no module {match[1]!r} in this folder or installed"
    if match := re.search(r"module '([\w.]+)' has no attribute '(\w+)'", message):
        return f"{key}: the module {match[1]!r} has no {match[2]!r}"
    if match := re.search(r"Expected '([\w.]+)' to be a subclass of <class '(?:\w+\.)*(\w+)'>", message):
        return f"{key}: {match[1]} is not {_with_article(match[2])}"
    if match := re.search(r"Import path ([\w.]+) does not correspond to a subclass of (\w+)", message):
        return f"{key}: {match[1]} is not {_with_article(match[2])}"
    if match := re.search(r"Multiple subclasses with name (\w+)\. Give the full class path .*?: ([\w., ]+\w)", message):
        return f"{key}: {match[1]} is the name of several classes; write one of {match[2]}"
    if key == "optim.optimizer" and re.search(r"Unexpected import|to be a function that returns", message):
        got = re.search(r"Given value: (\S+)", message)
        return f"{key}: {got[1] if got else ''!r} is not an Optimizer; write its dotted path, package.module.Class"
    if match := re.search(r"Group '([\w.]+)' does not accept option '([\w.]+)'", message):
        return _unknown_key(key, f"{match[1]}.{match[2]}", _owner(paths, None), option_names)
    if match := re.search(r"(?:Option|does not accept option) '([\w.]+)'", message):
        return _unknown_key(key, match[1], _owner(paths, None), option_names)
    if match := re.search(r"[Uu]nrecognized arguments: (.*)", message, re.DOTALL):
        argument = match[1].split()[0].removesuffix(".")
        if not argument.startswith("-"):
            return f"{argument!r}: an argument without a key; options are written --key=value"
        return _unknown_key(key, argument.lstrip("-").partition("=")[0], _owner(paths, None), option_names)
    of_callable = r"callable class: "  # as `optim.schedule` may be one of a few words, or a class
    if match := re.search(of_callable + r"the following arguments are required: ([\w, ]+)", message):
        return f"{_missing(key, match[1], _owner(paths, None))}, under init_args"
    if match := re.search(
        of_callable + r"Parser key [^\n]*\s+Expected a <class '(\w+)'>\. Got value: (.*?)\. Got", message
    ):
        return f"{key}: {match[2]!r} is not {_in_words(match[1])}"
    if match := re.search(r"arguments are required: ([\w., ]+?)\.?(?: Got value|\s*$)", message):
        return _missing(key, match[1], _owner(paths, None))
    if match := re.search(
        r"given class_path '(?:\w+\.)*(\w+)':\s+the following arguments are required: ([\w, ]+)", message
    ):
        return f"{key}: {match[1]} needs a value for {match[2]}, under init_args"
    if match := re.search(r"Subclasses are disabled for \w+, thus '([\w.]+)' is not accepted", message):
        allowed = sorted({name.split(".")[1] for name in option_names if name.startswith(f"{key}.")})
        return f"{key}: takes no class such as {match[1]}, only keys (allowed: {', '.join(allowed)})"
    if match := re.search(r"Given value: (.*?)(?:\. Got value|\n|$)", message) or re.search(
        r"Expected a [^\n]*?\. Got value: (.*?)(?:\. Got value|\n|$)", message
    ):
        nested = re.search(r"NestedArg\(key='.*?', val='?(.*?)'?\)$", match[1].rstrip("."))
        named = re.match(r"Namespace\(class_path='([\w.]+)'", match[1])
        value = nested[1] if nested else named[1] if named else match[1].rstrip(".")
        choices = ", ".join(re.findall(r"Expected a typing\.Literal\[(.*?)\]", message)).replace("'", "")
        types = dict.fromkeys(re.findall(r"Expected a <class '(?:\w+\.)*(?!NoneType)(\w+)'>", message))
        if choices:
            others = "".join(f", nor {_in_words(name)}" for name in types if name in NUMBERS)
            return f"{key}: {value!r} is not one of {', '.join(dict.fromkeys(choices.split(', ')))}{others}"
        if types:
            hint = f", as [{value}] would be" if [*types] == ["list"] else ""
            return f"{key}: {value!r} is not {' or '.join(map(_in_words, types))}{hint}"
    return re.sub(r"\s+", " ", message).strip()


def _in_words(type_name: str) -> str:
    return {**NUMBERS, "str": "text"}.get(type_name) or _with_article(type_name)


def _with_article(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def _top(options: Iterable[str]) -> list[str]:
    return sorted({option.partition(".")[0] for option in options})


def unknown(key: str, name: str, names: Iterable[str]) -> str:
    """The sentence for a `key` whose part `name` is not one of `names`, the allowed ones."""
    names = sorted(set(names))
    allowed = f" (allowed: {', '.join(names)})" if 0 < len(names) <= 20 else " (--help lists them)" if names else ""
    return f"{key}: unknown key{did_you_mean(name, names)}{allowed}"


def _unknown_key(key: str, name: str, owner: Any, option_names: list[str]) -> str:
    """The sentence for a `name` that is not a parameter of the class `owner` at `key`, or not an option (no owner)."""
    if owner is not None and owner.__init__ is object.__init__:  # a base class, as no other was named
        return _missing(key, key, None)
    if key == "optim.optimizer" and name == "lr":
        return "optim.optimizer.lr: set optim.learning_rate instead"
    if owner is not None:
        part, parameters = _unknown_part(owner, name)
        return unknown(f"{key}.{name}", part, parameters)
    group, dot, last = name.rpartition(".")
    siblings = (
        [o.removeprefix(group + ".") for o in option_names if o.startswith(group + ".")] if dot else _top(option_names)
    )
    if not siblings:
        return unknown(name, name.partition(".")[0], _top(option_names))
    return unknown(name, last, {sibling.partition(".")[0] for sibling in siblings})


def _unknown_part(cls: Any, name: str) -> tuple[str, list[str]]:
    """The first unknown part of the dotted `name`, and the known names there."""
    first, _, rest = name.partition(".")
    parameters = settable(cls)
    hint = hints(cls).get(first) if rest and first in parameters else None
    return _unknown_part(hint, rest) if dataclasses.is_dataclass(hint) else (first, parameters)


def _missing(key: str, names: str, owner: Any) -> str:
    if owner is not None:
        return f"{key}: {owner.__name__} needs a value for {names}"
    name = names.partition(", ")[0]
    if name.startswith("model."):
        return f"{name}: missing; give a config with a model, such as --config gdn_h2.yaml"
    return f"{names}: missing; write --{name}=VALUE"


def _unknown_class(key: str, name: str, owner: Any, path: str) -> str:
    base = _expected(owner, path) if owner else None
    if base is None:
        return f"{key}: {name!r} is not a known class; write its dotted path, package.module.Class"
    fitting = sorted(cls.__name__ for cls in subclasses(base) or {base} if not inspect.isabstract(cls))
    if any(cls.__name__ == name for cls in subclasses(base.__mro__[-2])):
        purpose = re.split(r"[.:]", inspect.getdoc(base) or "")[0]
        return (
            f"{key}: {name} does not fit here, where a {base.__name__} is needed ({purpose}): "
            f"one of {', '.join(fitting)}"
        )
    return (
        f"{key}: {name!r} is not a known {base.__name__}{did_you_mean(name, fitting)} "
        f"(known: {', '.join(fitting)}; or a dotted path)"
    )


def _owner(paths: list[str], parameter: str | None) -> Any:
    """The first class of `paths` (innermost first) that can be imported and has `parameter`, if one is given."""
    for path in paths:
        module, _, name = path.rpartition(".")
        try:
            cls = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError):
            continue
        if parameter is None or parameter in settable(cls):
            return cls
    if parameter is None:
        return None
    from zoo.lm.model import LanguageModel

    return LanguageModel if parameter in settable(LanguageModel) else None


def _expected(cls: Any, path: str) -> type | None:
    """The base class required of the component at the dotted `path`."""
    first, _, rest = path.removeprefix("model.").partition(".")
    hint = hints(cls).get(first)
    if rest:  # through a nested dataclass
        return _expected(hint, rest) if dataclasses.is_dataclass(hint) else None
    bases = (component(option) for option in (hint, *get_args(hint)))
    return next((base for base in bases if base is not None and is_ours(base)), None)
