"""The parameters and components of a constructor, read from its signature, which defines the config.

A component is built from a class named in the config: a parameter of type `Callable[..., C]` or `C` accepts a subclass
of C.
"""

import dataclasses
import enum
import inspect
from collections.abc import Callable, Collection
from pathlib import PurePath
from typing import Any, get_args, get_origin, get_type_hints

_NOT_BUILT = ("builtins", "collections.abc", "typing")  # modules whose types are not components
# passed by this project, not by configs
_BY_POSITION = ("self", "cls", "site", "heads", "size", "params", "lr", "optimizer")


def constructor(cls: Any) -> Callable[..., Any]:
    """The function whose parameters a config sets."""
    return cls.__new__ if "__new__" in vars(cls) else cls.__init__


def hints(cls: Any) -> dict[str, Any]:
    """Parameter → type; empty if the types cannot be resolved."""
    try:
        return get_type_hints(constructor(cls))
    except Exception:  # foreign annotations may raise anything
        return {}


def settable(cls: Any) -> list[str]:
    """The parameters that a config may set: all but those that this project passes by position."""
    if cls is None:
        return []
    return [name for name in inspect.signature(constructor(cls)).parameters if name not in _by_position(cls)]


def _by_position(cls: Any) -> Collection[str]:
    """The parameters that a config may not set; a dataclass is built from names alone."""
    return {"self"} if dataclasses.is_dataclass(cls) else _BY_POSITION


def required(cls: Any) -> list[str]:
    """The parameters that a config must set."""
    parameters = inspect.signature(constructor(cls)).parameters
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    empty = [name for name, each in parameters.items() if each.default is each.empty and each.kind not in optional]
    return [name for name in empty if name not in _by_position(cls)]


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
