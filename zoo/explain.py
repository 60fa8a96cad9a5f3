"""One clear sentence for a mistake in a config, from the nested messages of the parser."""

import importlib
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any, get_args, get_origin, get_type_hints

from mixers import did_you_mean

PATHS = re.compile(r"""class_path=?\s*'([\w.]+)'""")
KEYS = re.compile(r'Parser key "([\w.]+)"')


def explain(message: str, options: Iterable[str]) -> str:
    """The parser's message as one sentence: which key, what was given, what is allowed.

    Args:
        message: What jsonargparse says.
        options: All option names that the parser knows, such as ``model.hidden_size``.

    Returns:
        One line. A message of unknown form comes back on one line.
    """
    keys, known = KEYS.findall(message), sorted(set(options))
    key = ".".join(part.removeprefix("init_args.") for part in keys)
    owner = _owner(PATHS.findall(message), keys[-1].rpartition(".")[2] if keys else None)

    if found := re.search(r"Expected a dot import path string: (\S+?)\.?(?: Got value|\s|$)", message):
        return _unknown_class(key, found[1], owner)
    if found := re.search(r"Option '([\w.]+)' is not accepted", message):
        wanted = _parameters(_owner(PATHS.findall(message), None)) if keys else _top(known)
        return _unknown(f"{key}.{found[1]}" if key else found[1], found[1].partition(".")[0], wanted)
    if found := re.search(r"Group '([\w.]+)' does not accept option '([\w.]+)'", message):
        wanted = [o.removeprefix(found[1] + ".").partition(".")[0] for o in known if o.startswith(found[1] + ".")]
        return _unknown(f"{found[1]}.{found[2]}", found[2].partition(".")[0], wanted)
    if found := re.search(r"[Uu]nrecognized arguments: (.*)", message, re.DOTALL):
        return _unknown_argument(found[1].split()[0], known)
    if found := re.search(r"Expected a typing\.Literal\[(.*?)\]\. Got value: (\S+)", message):
        return f"{key}: {found[2]!r} is not one of {found[1].replace(chr(39), '')}"
    if found := re.search(r"Expected a <class '(?:\w+\.)*(?!NoneType)(\w+)'>\. Got value: (.*?)(?:\. Got value|\n|$)", message):
        return f"{key}: {found[2]!r} is no {_plain(found[1])}"
    return re.sub(r"\s+", " ", message).strip()


def _plain(kind: str) -> str:
    return {"int": "whole number", "float": "number", "bool": "true or false", "str": "text"}.get(kind, kind)


def _top(options: Iterable[str]) -> list[str]:
    return sorted({option.partition(".")[0] for option in options})


def _unknown(key: str, name: str, wanted: Iterable[str]) -> str:
    wanted = sorted(set(wanted))
    allowed = f" (allowed: {', '.join(wanted)})" if wanted else ""
    return f"{key}: unknown key{did_you_mean(name, wanted)}{allowed}"


def _unknown_argument(argument: str, known: list[str]) -> str:
    name = argument.lstrip("-").partition("=")[0]
    if not argument.startswith("-"):
        return f"{argument!r}: an argument without a key; options are written --key=value"
    group, dot, last = name.rpartition(".")
    siblings = [o.removeprefix(group + ".") for o in known if o.startswith(group + ".")] if dot else _top(known)
    if not siblings:
        return _unknown(name, name.partition(".")[0], _top(known))
    return _unknown(name, last, {sibling.partition(".")[0] for sibling in siblings})


def _unknown_class(key: str, name: str, owner: Any) -> str:
    base = _expected(owner, key.rpartition(".")[2]) if owner else None
    if base is None:
        return f"{key}: {name!r} is no known class; write its dotted path, package.module.Class"
    fitting = sorted(_subclasses(base))
    if any(cls.__name__ == name for cls in _all_subclasses(base.__mro__[-2])):
        return f"{key}: {name} does not fit here, where a {base.__name__} is needed (one of {', '.join(fitting)})"
    return (
        f"{key}: {name!r} is no known {base.__name__}{did_you_mean(name, fitting)} "
        f"(known: {', '.join(fitting)}; or a dotted path)"
    )


def _owner(paths: list[str], parameter: str | None) -> Any:
    """The innermost class of `paths`, or the innermost one that has `parameter`."""
    for path in reversed(paths):
        module, _, name = path.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError):
            continue
        if parameter is None or parameter in _parameters(found):
            return found
    if parameter is None:
        return None
    from .model import LanguageModel  # the root of what a config builds

    return LanguageModel if parameter in _parameters(LanguageModel) else None


def _constructor(cls: Any) -> Callable[..., Any]:
    return cls.__new__ if "__new__" in vars(cls) else cls.__init__


def _parameters(cls: Any) -> list[str]:
    """What a config may set: the parameters without the ones that the project passes by position."""
    if cls is None:
        return []
    own = inspect.signature(_constructor(cls)).parameters
    return [n for n, p in own.items() if n not in ("self", "cls", "site", "heads", "size") and p.kind is not p.VAR_KEYWORD]


def _expected(cls: Any, parameter: str) -> type | None:
    """The class that a component under `parameter` must be: of Callable[..., C] it is C."""
    hint = get_type_hints(_constructor(cls)).get(parameter)
    for option in (hint, *get_args(hint)):
        if get_origin(option) is not None and "Callable" in str(get_origin(option)):
            option = get_args(option)[-1]
        if isinstance(option, type) and option.__module__.partition(".")[0] in ("zoo", "mixers"):
            return option
    return None


def _all_subclasses(base: type) -> set[type]:
    return {cls for direct in base.__subclasses__() for cls in (direct, *_all_subclasses(direct))}


def _subclasses(base: type) -> set[str]:
    return {cls.__name__ for cls in _all_subclasses(base) if not cls.__name__.startswith("_")}
