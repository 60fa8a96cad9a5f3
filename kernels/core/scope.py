"""Context variables with a value inside a ``with`` block."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Value = TypeVar("Value")


@contextmanager
def scope(variable: ContextVar[Value], value: Value) -> Iterator[Value]:
    """Yield `value`, which the variable has inside the block, in the thread that entered it."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)
