"""Wrong numbers for the arguments of constructors, found by their signatures, so that a new class is covered, too."""

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest

from kernels import UserError

WRONG_SIZES = (0, -1, True, 2.5, math.nan)
WRONG_NUMBERS = (-1.0, math.nan, math.inf, True)


def kinds(annotation: Any) -> tuple[Any, ...]:
    """The types that an argument may have, without None."""
    union = get_origin(annotation) in (Union, UnionType)
    return tuple(kind for kind in (get_args(annotation) if union else (annotation,)) if kind is not type(None))


def wrong(made: Iterable[type], allowed: Mapping[str, tuple[Any, ...]]) -> Iterator[tuple[type, str, Any]]:
    """A class, one of its arguments, and a value that it must refuse.

    Args:
        made: The classes.
        allowed: Values that are wrong in general, but mean something for an argument: `Class.argument` or `argument`.
    """
    for cls in made:
        hints = get_type_hints(cls.__init__)
        for name in inspect.signature(cls).parameters:
            expected_names = kinds(hints.get(name))
            values = WRONG_SIZES if expected_names == (int,) else WRONG_NUMBERS if expected_names == (float,) else ()
            meant = (*allowed.get(name, ()), *allowed.get(f"{cls.__name__}.{name}", ()))
            for value in values:
                if not any(value is good or (type(value) is type(good) and value == good) for good in meant):
                    yield cls, name, value


def named(case: Any) -> str:
    """The name of a case."""
    return case.__name__ if isinstance(case, type) else str(case)


def refuses(cls: type, name: str, value: Any, arguments: Mapping[str, Any], also: tuple[str, ...] = ()) -> None:
    """One sentence that begins with the argument's name and has the value.

    Args:
        cls: A class.
        name: The argument.
        value: What is wrong with it.
        given: Values of arguments without a default, by name.
        also: Arguments that need a value even though they have a default.
    """
    parameters = inspect.signature(cls).parameters.values()
    needed = {p.name: arguments[p.name] for p in parameters if p.default is p.empty or p.name in also}
    cls(**needed)
    with pytest.raises(UserError) as caught:
        cls(**{**needed, name: value})
    message = str(caught.value)
    assert message.startswith(f"{name}: "), message
    assert str(value) in message, message
    assert "\n" not in message
