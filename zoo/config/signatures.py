"""The parameters and components of a constructor, read from its signature, which defines the config.

A component is built from a class named in the config: a parameter of type `Callable[..., C]` or `C` accepts a subclass
of C.
"""

import dataclasses
import enum
import inspect
from collections.abc import Callable
from pathlib import PurePath
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

_NOT_BUILT = ("builtins", "collections.abc", "typing")  # modules whose types are not components
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def constructor(cls: Any) -> Callable[..., Any]:
    """The function whose parameters a config sets."""
    return cls.__new__ if "__new__" in vars(cls) else cls.__init__


def hints(cls: Any) -> dict[str, Any]:
    """Parameter → type; empty if the types cannot be resolved."""
    try:
        return get_type_hints(constructor(cls))
    except Exception:  # foreign annotations may raise anything
        return {}


def settable(cls: Any, by_position: int = 0) -> list[str]:
    """The parameters that a config may set: all but the first ones, which are passed by position."""
    return [name for name, each in _parameters(cls)[by_position:] if each.kind not in _VARIABLE]


def absent_by_default(cls: Any) -> set[str]:
    """The parameters whose default is None, whatever their type says."""
    return {name for name, each in _parameters(cls) if each.default is None}


def required(cls: Any, by_position: int = 0) -> list[str]:
    """The parameters that a config must set."""
    parameters = dict(_parameters(cls))
    return [name for name in settable(cls, by_position) if parameters[name].default is inspect.Parameter.empty]


def takes_any_name(cls: Any) -> bool:
    """Return whether a class takes arguments that its signature does not name."""
    return any(each.kind in _VARIABLE for _, each in _parameters(cls))


def _parameters(cls: Any) -> list[tuple[str, inspect.Parameter]]:
    return [*inspect.signature(constructor(cls)).parameters.items()][1:]  # after self or cls


def passed_by_position(hint: Any) -> int:
    """Number of arguments that a component of type `Callable[[…], C]` is called with."""
    arguments = get_args(hint)[0] if get_origin(hint) is Callable and get_args(hint) else ()
    return len(arguments) if isinstance(arguments, list) else 0


def alternatives(hint: Any) -> tuple[Any, ...]:
    """The types in a union, or the one type."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def component(hint: Any) -> type | None:
    """The class C of a component of type `Callable[..., C]` or `C`; None for plain values and dataclasses."""
    if get_origin(hint) is Callable and get_args(hint):
        hint = get_args(hint)[-1]
    plain = not isinstance(hint, type) or hint.__module__ in _NOT_BUILT or dataclasses.is_dataclass(hint)
    return None if plain or get_args(hint) or issubclass(hint, enum.Enum | PurePath) else hint


def is_ours(cls: type) -> bool:
    """Return whether a class belongs to this project."""
    return cls.__module__.partition(".")[0] in ("zoo", "mixers")


def subclasses(base: type) -> set[type]:
    """All classes below `base` in modules that have been imported."""
    direct: set[type] = set(base.__subclasses__())
    return direct.union(*map(subclasses, direct))
