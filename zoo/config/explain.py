"""Explains in one sentence why a config was refused: the key, the value, and what is allowed.

Keys and classes are checked against the signatures of constructors. What is wrong with a value is read from the message
of jsonargparse (4.53); `tests/test_cli.py` has a mistake of each form, and fails if one changes.
"""

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterable, Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin

from kernels import UserError
from mixers import did_you_mean
from zoo.config.overlays import nested
from zoo.config.signatures import component, constructor, hints, is_ours, required, settable, subclasses
from zoo.files.safe_yaml import parse_yaml

NUMBERS = {"int": "a whole number", "float": "a number", "bool": "true or false"}  # in words


def explain(message: str, types: Mapping[str, Any], items: Iterable[str | Mapping[str, Any]] = ()) -> str:
    """The parser's complaint as one sentence: the key, the value, and what is allowed.

    Args:
        message: The message of jsonargparse.
        types: The parser's keys, such as ``model.hidden_size``, and their types.
        items: The configs and overrides `key=value` that were parsed, in order.

    Returns:
        One line. An unrecognised message is returned with its line breaks removed.
    """
    config: Any = {}
    for item in items:
        config = _merged(config, _override(item) if isinstance(item, str) else _flat(item))
    return _wrong_key(config, types) or _wrong_value(message, types)


def _override(item: str) -> Any:
    """An override as a config without `init_args`."""
    key, _, text = item.partition("=")
    try:
        value = _flat(parse_yaml(text, key))
    except UserError:
        value = text
    return nested(key.removesuffix("+").replace(".init_args.", "."), value)


def _flat(value: Any) -> Any:
    """A config with the arguments of each class next to its `class_path`."""
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


def _wrong_key(config: Mapping[str, Any], types: Mapping[str, Any], group: str = "") -> str | None:
    """A sentence about the first key or class that does not exist, or that a class lacks; None without one."""
    for name, value in config.items():
        key = group + name
        if key in types:
            sentence = _wrong_part(types[key], value, key)
        elif not any(option.startswith(f"{key}.") for option in types):
            while isinstance(value, dict) and len(value) == 1:  # the whole key, as in an override
                ((part, value),) = value.items()
                key += f".{part}"
            siblings = {option.removeprefix(group).partition(".")[0] for option in types if option.startswith(group)}
            return unknown(key, name, siblings)
        else:
            sentence = _wrong_key(value, types, f"{key}.") if isinstance(value, dict) else None
        if sentence is not None:
            return sentence
    return None


def _wrong_part(hint: Any, value: Any, key: str) -> str | None:
    """As `_wrong_key`, but for the value of a parameter with the type `hint`."""
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    values = value if isinstance(value, list) else [*value.values()] if isinstance(value, dict) else []
    for option in options:
        base, origin, inner = component(option), get_origin(option), get_args(option)
        if dataclasses.is_dataclass(option) and isinstance(value, dict):
            return _wrong_argument(option, value, key)
        if base is not None and isinstance(value, dict | str):
            return _wrong_component(base, value, key, [each for each in options if each is not option])
        if inspect.isclass(origin) and issubclass(origin, Iterable) and values and inner[-1] is not ...:
            sentences = (_wrong_part(inner[-1], each, key) for each in values)
            if (sentence := next(filter(None, sentences), None)) is not None:
                return sentence
    return None


def _wrong_argument(cls: Any, arguments: Mapping[str, Any], key: str) -> str | None:
    """As `_wrong_key`, but for the arguments of a class."""
    parameters, types = settable(cls), hints(cls)
    for name, value in arguments.items():
        if name in parameters:
            if (sentence := _wrong_part(types.get(name), value, f"{key}.{name}")) is not None:
                return sentence
        elif key == "optim.optimizer" and name == "lr":
            return "optim.optimizer.lr: set optim.learning_rate instead"
        elif not {"args", "kwargs"} & {*parameters}:
            return unknown(f"{key}.{name}", name, parameters)
    if missing := [name for name in required(cls) if name not in arguments]:
        return f"{key}: {cls.__name__} needs a value for {', '.join(missing)}, under init_args"
    return None


def _wrong_component(base: type, value: Any, key: str, others: Iterable[Any]) -> str | None:
    """As `_wrong_key`, but for a component that must derive from `base`, unless it is of another type."""
    arguments = {"class_path": value} if isinstance(value, str) else dict(value)
    path = arguments.pop("class_path", None)
    words = [word for other in others for word in get_args(other) if isinstance(word, str)]
    if path is None:  # arguments of the default
        return _missing(key) if constructor(base) is object.__init__ else _wrong_argument(base, arguments, key)
    if not isinstance(path, str) or path in words or (isinstance(value, str) and str in others):
        return None
    module, _, name = path.rpartition(".")
    if module:
        try:
            classes = {getattr(importlib.import_module(module), name)}
        except ModuleNotFoundError as error:
            return (
                f"{key}: {path!r} cannot be imported, as there is no module {error.name!r} in this folder or "
                "installed; go to the folder that it is in, or add that to PYTHONPATH"
            )
        except ImportError as error:
            return f"{key}: {path!r} cannot be imported: {error}"
        except AttributeError:
            return f"{key}: the module {module!r} has no {name!r}"
    else:
        classes = {cls for cls in subclasses(base) | {base} if cls.__name__ == path}
    if not classes:
        return _unknown_class(base, path, key, words)
    if len(classes) > 1:
        paths = ", ".join(sorted(f"{cls.__module__}.{cls.__name__}" for cls in classes))
        return f"{key}: {path} is the name of several classes; write one of {paths}"
    (cls,) = classes
    if not isinstance(cls, type):
        return f"{key}: {path!r} is not {_with_article(base.__name__)}; write its dotted path, package.module.Class"
    if not issubclass(cls, base):
        return f"{key}: {path} is not {_with_article(base.__name__)}"
    return _wrong_argument(cls, arguments, key)


def _unknown_class(base: type, name: str, key: str, words: list[str]) -> str:
    start = f"{key}: {name!r} is not " + (f"one of {', '.join(words)}, nor " if words else "") + "a known"
    if not is_ours(base):
        return f"{start} class; write its dotted path, package.module.Class"
    fitting = sorted(cls.__name__ for cls in subclasses(base) or {base} if not inspect.isabstract(cls))
    if any(cls.__name__ == name for cls in subclasses(base.__mro__[-2])):
        purpose = re.split(r"[.:]", inspect.getdoc(base) or "")[0]
        start = f"{key}: {name} does not fit here, where a {base.__name__} is needed ({purpose})"
        return f"{start}: one of {', '.join(fitting)}"
    choices = f"(known: {', '.join(fitting)}; or a dotted path)"
    return f"{start} {base.__name__}{did_you_mean(name, fitting)} {choices}"


def unknown(key: str, name: str, names: Iterable[str]) -> str:
    """The sentence for a `key` whose part `name` is not one of `names`, the allowed ones."""
    names = sorted(set(names))
    allowed = f" (allowed: {', '.join(names)})" if 0 < len(names) <= 20 else " (--help lists them)" if names else ""
    return f"{key}: unknown key{did_you_mean(name, names)}{allowed}"


def _wrong_value(message: str, types: Iterable[str]) -> str:
    """The parser's message about a value in words."""
    key = ".".join(part.removeprefix("init_args.") for part in re.findall(r'Parser key "([\w.]+)"', message))
    if match := re.search(r"[Uu]nrecognized arguments: (.*)", message, re.DOTALL):
        argument = match[1].split()[0].removesuffix(".")
        if not argument.startswith("-"):
            return f"{argument!r}: an argument without a key; options are written --key=value"
        name = argument.lstrip("-").partition("=")[0]
        return unknown(name, name, {option.partition(".")[0] for option in types})
    if match := re.search(r"arguments are required: ([\w., ]+?)\.?(?: Got value|\s*$)", message):
        return _missing(match[1].partition(", ")[0])
    if match := re.search(  # of an argument of a class in place of a word
        r"callable class: Parser key [^\n]*\s+Expected a <class '(\w+)'>\. Got value: (.*?)\. Got", message
    ):
        return f"{key}: {match[2]!r} is not {_in_words(match[1])}"
    if match := re.search(r"Given value: (.*?)(?:\. Got value|\n|$)", message) or re.search(
        r"Expected a [^\n]*?\. Got value: (.*?)(?:\. Got value|\n|$)", message
    ):
        nested = re.search(r"NestedArg\(key='.*?', val='?(.*?)'?\)$", match[1].rstrip("."))
        value = nested[1] if nested else match[1].rstrip(".")
        choices = ", ".join(re.findall(r"Expected a typing\.Literal\[(.*?)\]", message)).replace("'", "")
        expected = dict.fromkeys(re.findall(r"Expected a <class '(?:\w+\.)*(?!NoneType)(\w+)'>", message))
        if choices:
            others = "".join(f", nor {_in_words(name)}" for name in expected if name in NUMBERS)
            return f"{key}: {value!r} is not one of {', '.join(dict.fromkeys(choices.split(', ')))}{others}"
        if expected:
            hint = f", as [{value}] would be" if [*expected] == ["list"] else ""
            return f"{key}: {value!r} is not {' or '.join(map(_in_words, expected))}{hint}"
    return re.sub(r"\s+", " ", message).strip()


def _missing(key: str) -> str:
    advice = "give a config with a model, such as --config gdn_h2.yaml" if "model." in key else f"write --{key}=VALUE"
    return f"{key}: missing; {advice}"


def _in_words(type_name: str) -> str:
    return {**NUMBERS, "str": "text"}.get(type_name) or _with_article(type_name)


def _with_article(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"
