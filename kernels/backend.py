"""Which implementation runs: ``auto``, ``triton``, ``torch`` (chunkwise PyTorch) or ``reference`` (fp32 loops).

``auto`` takes the fastest that an op has for the tensor's device. An explicit choice that an op cannot honour is an
error, never a silent fallback. Each op names its implementations in a dict and asks :func:`choose`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from .errors import UserError

BACKENDS = ("auto", "triton", "torch", "reference")
_chosen: ContextVar[str] = ContextVar("backend", default="auto")


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Run the ops inside the ``with`` block on the named backend.

    Raises:
        UserError: The name is none of ``auto``, ``triton``, ``torch``, ``reference``.
    """
    if name not in BACKENDS:
        raise UserError(f"backend: {name!r} is not one of {', '.join(BACKENDS)}")
    token = _chosen.set(name)
    try:
        yield
    finally:
        _chosen.reset(token)


def choose(op: str, implementations: Mapping[str, Callable[..., Any]], x: Tensor) -> Callable[..., Any]:
    """The implementation of `op` that runs on the device of `x` under the chosen backend."""
    name = _chosen.get()
    if name == "auto":
        name = "triton" if "triton" in implementations and x.is_cuda else "torch"
    if name not in implementations:
        raise UserError(
            f"backend: {op} has no {name!r} implementation; choose one of {', '.join(implementations)} or auto"
        )
    return implementations[name]
