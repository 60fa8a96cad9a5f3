"""`deterministic`: results of a sequence that do not depend on what else is in the batch.

Kernels choose tiles, segments and algorithms by the size of the whole batch, as that is fastest. Inside
``with deterministic():`` these choices depend on the sizes of one sequence and on the dtype only. The mode covers the
ops of `kernels`, their gradients, and the mixers and language models that are made of them.

The scope is that of `backend`: the environment variable ``ZOO_DETERMINISTIC=1`` applies to the whole process, in all
threads; the ``with`` block applies to ops called inside it by the thread that entered it. An op takes the mode when it
is called, and its backward pass follows in whatever thread that runs. Compiled code keeps the mode it was traced with.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from ..errors import UserError
from .scope import scope

Result = TypeVar("Result")
_environment = os.environ.get("ZOO_DETERMINISTIC", "0")
_mode: ContextVar[bool] = ContextVar("deterministic", default=_environment == "1")


@contextmanager
def deterministic(enabled: bool = True) -> Iterator[None]:
    """Inside the ``with`` block a row of a batch, or a packed document, has bit by bit the results it has alone.

    >>> with kernels.deterministic():
    ...     logits, _ = model(tokens)

    Args:
        enabled: Whether the mode is on; False turns it off inside the block.
    """
    with scope(_mode, enabled):
        yield


def is_deterministic() -> bool:
    """Return whether `deterministic` is in force.

    Raises:
        UserError: ``ZOO_DETERMINISTIC`` is neither 0 nor 1.
    """
    if _environment not in ("0", "1"):
        raise UserError(f"ZOO_DETERMINISTIC: {_environment!r} is not one of 0, 1")
    return _mode.get()


def in_mode(mode: bool, function: Callable[..., Result], *args: object) -> Result:
    """Return function(*args), called in this mode; where it is in force already, entering it would only take time."""
    if mode == _mode.get():
        return function(*args)
    with deterministic(mode):
        return function(*args)


# as in `backend.py`: the compiler cannot trace context variables
is_deterministic._dynamo_marked_constant = True  # type: ignore[attr-defined]
