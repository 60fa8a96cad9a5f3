"""The parameters and components of a constructor, read from its signature, which defines the config.

A component is built from a class named in the config: a parameter of type `Callable[..., C]` or `C` accepts a subclass
of C.
"""

import dataclasses
import enum
import functools
import inspect
from collections.abc import Callable
from pathlib import PurePath
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from zoo.config.jsonargparse_internals import followed_parameters

_NOT_BUILT = ("builtins", "collections.abc", "datetime", "typing")  # modules whose types are not components
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Parameter(NamedTuple):
    """A parameter that a config may set.

    Attributes:
        hint: Its type; None if it is not known.
        default: Its default: `inspect.Parameter.empty` if a value is required, `...` if it cannot be determined.
    """

    hint: Any
    default: Any

    @property
    def required(self) -> bool:
        """Return whether a config must set it."""
        return self.default is inspect.Parameter.empty


def constructor(cls: Any) -> Callable[..., Any]:
    """The function whose parameters a config sets."""
    if not isinstance(cls, type):
        return cls
    return cls.__new__ if "__new__" in vars(cls) else cls.__init__  # type: ignore[misc]


def parameters(cls: Any) -> dict[str, Parameter]:
    """The parameters of a class or function, with those that `**kwargs` passes on to base classes."""
    return _parameters(cls, constructor(cls))


@functools.cache
def _parameters(cls: Any, function: Callable[..., Any]) -> dict[str, Parameter]:
    signature = [*inspect.signature(function).parameters.values()][isinstance(cls, type) :]  # after self or cls
    types = hints(cls)
    if isinstance(cls, type) and (not types or any(each.kind in _VARIABLE for each in signature)):
        signature = followed_parameters(cls) or signature
    factories = {}
    if dataclasses.is_dataclass(cls):
        factories = {field.name: field.default_factory for field in dataclasses.fields(cls)}
    settable_parameters = {}
    for each in signature:
        if each.kind not in _VARIABLE:
            default = each.default
            if (factory := factories.get(each.name, dataclasses.MISSING)) is not dataclasses.MISSING:
                default = factory()
            resolvable = each.annotation is not inspect.Parameter.empty and not isinstance(each.annotation, str)
            hint = types.get(each.name, each.annotation if resolvable else None)
            settable_parameters[each.name] = Parameter(hint, default)
    return settable_parameters


def hints(cls: Any) -> dict[str, Any]:
    """Parameter → type; empty if the types cannot be resolved."""
    try:
        return get_type_hints(constructor(cls))
    except Exception:  # foreign annotations may raise anything
        return {}


def settable(cls: Any, by_position: int = 0) -> list[str]:
    """The parameters that a config may set: all but the first ones, which are passed by position."""
    return [*parameters(cls)][by_position:]


def takes_any_name(cls: Any) -> bool:
    """Return whether a class takes arguments that its signature does not name."""
    kinds = [each.kind for each in inspect.signature(constructor(cls)).parameters.values()]
    return inspect.Parameter.VAR_KEYWORD in kinds


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
    plain = not isinstance(hint, type) or hint.__module__ in _NOT_BUILT or is_group(hint)
    return None if plain or get_args(hint) or issubclass(hint, enum.Enum | PurePath | int | float | str) else hint


def is_group(hint: Any) -> bool:
    """Return whether a type is a dataclass or a named tuple, whose fields are keys of the config."""
    return dataclasses.is_dataclass(hint) or (isinstance(hint, type) and hasattr(hint, "_fields") and hint is not tuple)


def is_ours(cls: type) -> bool:
    """Return whether a class belongs to this project."""
    return cls.__module__.partition(".")[0] in ("zoo", "mixers")


def subclasses(base: type) -> set[type]:
    """All classes below `base` in modules that have been imported."""
    direct: set[type] = set(base.__subclasses__())
    return direct.union(*map(subclasses, direct))
