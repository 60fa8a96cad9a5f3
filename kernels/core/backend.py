"""Choice of the implementation: ``auto``, ``triton``, ``torch`` (chunks), ``reference`` (fp32 loops) or ``flashqla``.

``auto`` picks the fastest implementation for the tensor's device. Where the Triton kernels cannot take the arguments,
it runs PyTorch on the GPU and logs a warning. An explicit choice that an op cannot honour is an error, never a
fallback. Each op lists its implementations in an `Op` (`op.py`). ``flashqla``, an optional package, is of
one op alone, the delta rule; under it other ops, and single tokens, run as under ``auto``.

The scope of a choice:

- The environment variable ``ZOO_BACKEND`` applies to the whole process, in all threads.
- ``with backend(name):`` takes precedence for ops called inside the block by the thread that entered it. Other
  threads, including those of autograd, are not affected.
- An op chooses once, when it is called. Its backward pass follows that choice, wherever and in whatever thread
  ``backward()`` is called.
- ``torch.utils.checkpoint`` calls ops again in the backward pass, on a GPU from an autograd thread, where they would
  choose again. With ``context_fn=kernels.same_backend`` they use the backend of the first call. Activation
  checkpointing in ``zoo`` passes it; pass it in your own checkpoints, or PyTorch raises a ``CheckpointError`` if the
  backends differ.
- Compiled code keeps the backend that it was traced with.

:func:`implementations` tells which ran.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError

log = logging.getLogger(__name__)

BACKENDS = ("auto", "triton", "torch", "reference", "flashqla")
PARTIAL = ("flashqla",)  # of some ops only, which check themselves what they are given
_default = os.environ.get("ZOO_BACKEND", "auto")
_chosen: ContextVar[str] = ContextVar("backend", default=_default)
_noted: ContextVar[dict[str, set[str]] | None] = ContextVar("implementations", default=None)


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Run the ops inside the ``with`` block on the named backend.

    Raises:
        UserError: The name is not one of `BACKENDS`.
    """
    if name not in BACKENDS:
        raise UserError(f"backend: {name!r} is not one of {', '.join(BACKENDS)}")
    token = _chosen.set(name)
    try:
        yield
    finally:
        _chosen.reset(token)


@contextmanager
def implementations() -> Iterator[dict[str, set[str]]]:
    """Collect which implementations run inside the ``with`` block, in the thread that entered it, by op.

    Compiled code chooses once, when it is traced.

    >>> with kernels.implementations() as ran:
    ...     o, _ = kernels.delta_rule(q, k, v, beta)
    >>> ran
    {'delta_rule': {'torch'}}
    """
    ran: dict[str, set[str]] = {}
    token = _noted.set(ran)
    try:
        yield ran
    finally:
        _noted.reset(token)


def same_backend() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """A `context_fn` for `torch.utils.checkpoint`: recompute with the backend that is chosen now."""
    return nullcontext(), _Again(_chosen.get())


class _Again(AbstractContextManager[None]):
    """`backend(name)` as a reentrant context manager: every backward pass through a checkpoint enters it again."""

    def __init__(self, name: str):
        self.name = name
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        block = backend(self.name)
        block.__enter__()
        self._entered.append(block)

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


def chosen(op: str, implemented: tuple[str, ...], x: Tensor, limits: str | None = None) -> str:
    """Return which of the implementations of `op` runs on the device of `x` under the backend in force.

    Args:
        op: Name of the op.
        implemented: Names of its implementations.
        x: One of the op's arguments, for its device and dtype.
        limits: Why the Triton kernels cannot take the arguments, as a relative clause ("which takes …"); None if they
            can.

    Raises:
        UserError: The backend cannot run the op.
    """
    fp64 = x.dtype == torch.float64
    name = _name(op, implemented, x.device.type, fp64, limits)
    if x.is_cuda and name == "torch" and "triton" in implemented and not torch.compiler.is_compiling():
        reason = _no_triton("cuda", fp64, limits)
        if reason and _chosen.get() in ("auto", *PARTIAL):
            _say(op, x.shape[-1], reason)
    return name


@cache  # warns once, however many batch sizes and lengths there are
def _say(op: str, channels: int, reason: str) -> None:
    log.warning("%s of %d channels runs in PyTorch, not on 'triton', %s", op, channels, reason)


def _name(op: str, implemented: tuple[str, ...], device: str, fp64: bool, limits: str | None) -> str:
    name = _allowed(op, implemented, device, fp64, limits)
    noted = _noted.get()
    if noted is not None:
        noted.setdefault(op, set()).add(name)
    return name


def _allowed(op: str, implemented: tuple[str, ...], device: str, fp64: bool, limits: str | None) -> str:
    name = _chosen.get()
    if name not in BACKENDS:
        raise UserError(f"ZOO_BACKEND: {name!r} is not one of {', '.join(BACKENDS)}")
    if name in PARTIAL and name in implemented:
        return name
    reason = _no_triton(device, fp64, limits)
    if name in ("auto", *PARTIAL):
        return "triton" if "triton" in implemented and device == "cuda" and not reason else "torch"
    others = ", ".join(other for other in implemented if other not in (name, *PARTIAL))
    if name not in implemented:
        raise UserError(f"backend: {op} has no {name!r} implementation; choose one of {others} or auto")
    if name == "triton" and reason:
        raise UserError(f"backend: {op} cannot run on 'triton', {reason}; choose one of {others} or auto")
    return name


# The attribute that torch.compiler.assume_constant_result sets, without importing the compiler, which cannot trace
# context variables.
_name._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _no_triton(device: str, fp64: bool, limits: str | None) -> str | None:
    """Why the Triton kernels cannot run; None if they can."""
    if fp64:
        return "which computes in fp32, with tensors in fp64"
    if device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"which needs a GPU or TRITON_INTERPRET=1, with tensors on {device}"
    return limits if _importable() else "which is not installed"


@cache
def _importable() -> bool:
    return find_spec("triton") is not None
