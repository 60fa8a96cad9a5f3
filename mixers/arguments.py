"""Checks of the numbers that constructors take. Every message begins with the name of the argument."""

import math
from collections.abc import Mapping
from numbers import Integral, Real

from kernels import UserError

LARGEST = 2**31 - 1  # of a size


def check_sizes(sizes: Mapping[str, int | None], *, least: int = 1) -> None:
    """Raise a UserError unless each size is a whole number, not True or False, from `least`; None means the default."""
    for name, size in sizes.items():
        if size is None:
            continue
        if not isinstance(size, Integral) or isinstance(size, bool):
            raise UserError(f"{name}: {size!r} must be a whole number")
        if size < least:
            raise UserError(f"{name}: {size} must be at least {least}")
        if size > LARGEST:
            raise UserError(f"{name}: {size} must be at most {LARGEST}")


def size_or(name: str, size: int | None, default: int) -> int:
    """A size that is a whole number from 1, or the default for None; anything else raises a UserError."""
    check_sizes({name: size})
    return default if size is None else size


def check_finite(numbers: Mapping[str, float]) -> None:
    """Raise a UserError unless each number is finite."""
    for name, x in numbers.items():
        if not _is_finite(x):
            raise UserError(f"{name}: {x!r} must be a finite number")


def check_numbers(numbers: Mapping[str, float | None], *, positive: bool = True) -> None:
    """Raise a UserError unless each number is finite and above 0, or with `positive=False` at least 0, or None."""
    for name, x in numbers.items():
        if x is None:
            continue
        if not _is_finite(x) or x < 0 or (positive and x == 0):
            raise UserError(f"{name}: {x!r} must be a finite number {'above 0' if positive else 'that is not below 0'}")


def _is_finite(x: object) -> bool:
    """Return whether x is a number that a float can hold, and not True or False."""
    if not isinstance(x, Real) or isinstance(x, bool):
        return False
    try:
        return math.isfinite(x)
    except OverflowError:  # an integer above 1.8e308
        return False
