"""Names in the arguments of verbs."""

import math
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kernels import UserError
from mixers import did_you_mean


def names_in(value: list[str] | str | None) -> list[str]:
    """Return the names in a list, or in text that separates them by commas, perhaps in brackets."""
    if not isinstance(value, str):
        return list(value or [])
    inside = value.strip()
    if inside.startswith("[") and inside.endswith("]"):
        inside = inside[1:-1]
    return [name.strip() for name in inside.split(",") if name.strip()]


@contextmanager
def errors_about(key: str) -> Iterator[None]:
    """Let the sentence of a UserError in the block, which reads what `key` names, begin with that key."""
    try:
        yield
    except UserError as error:
        sentence, *rest = error.args
        raise UserError(f"{key}: {str(sentence).removeprefix('checkpoint: ')}", *rest) from error


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its type if it has no message."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


def described(error: BaseException, module: str = "") -> str:
    """Return an exception in a line: the last line of code in a module that it passed, its type and its message."""
    frames = [each for each in traceback.walk_tb(error.__traceback__) if each[0].f_globals.get("__name__") == module]
    place = f"{Path(frames[-1][0].f_code.co_filename).name}, line {frames[-1][1]}: " if frames else ""
    return f"{place}{type(error).__name__}: {' '.join(str(error).split())}"


def check_not_empty(argument: str, value: object) -> None:
    """Raise a UserError for a value that is empty text."""
    if isinstance(value, str) and not value.strip():
        raise UserError(f"{argument}: {value!r} is empty; write a value, or leave it out")


def check_above_0(argument: str, value: float) -> None:
    """Raise a UserError unless a number is above 0 and finite."""
    if not 0 < value < math.inf:
        raise UserError(f"{argument}: {value} must be above 0 and finite")


def check_seed(seed: int | None) -> None:
    """Raise a UserError unless PyTorch can use the seed; None means a random one."""
    if seed is not None and not -(2**63) <= seed < 2**64:
        raise UserError(f"seed is {seed}, but must be between -2**63 and 2**64 - 1.")


def check_names(argument: str, values: Iterable[str], names: Iterable[str]) -> None:
    """Raise a UserError for the first value that is not one of the names."""
    names = list(names)
    for value in values:
        if value not in names:
            raise UserError(f"{argument}: {value!r} is not one of {', '.join(names)}{did_you_mean(value, names)}")
