"""Ops with several implementations, and the choice of one at each call.

``auto`` picks the fastest implementation for the tensor's device: ``triton`` on a GPU, else ``torch`` (chunks). Where
the Triton kernels cannot take the arguments, it runs PyTorch on the GPU and logs a warning. ``reference`` are loops in
fp32. An explicit choice that an op cannot honour is an error, never a fallback.

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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch as pytorch
from torch import Tensor

from ..errors import UserError
from .deterministic import deterministic, is_deterministic
from .scope import scope

log = logging.getLogger(__name__)

BACKENDS = ("auto", "triton", "torch", "reference")
_default = os.environ.get("ZOO_BACKEND", "auto")
_chosen: ContextVar[str] = ContextVar("backend", default=_default)
_meta_as_gpu: ContextVar[bool] = ContextVar("meta_as_gpu", default=False)
_ran: ContextVar[dict[str, set[str]] | None] = ContextVar("implementations", default=None)
Implementation = Callable[..., Any]


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Run the ops inside the ``with`` block on the named backend.

    Raises:
        UserError: The name is not one of `BACKENDS`.
    """
    if name not in BACKENDS:
        raise UserError(f"backend: {name!r} is not one of {', '.join(BACKENDS)}")
    with scope(_chosen, name):
        yield


def backend_name() -> str:
    """Return the name of the backend in force."""
    return _chosen.get()


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
    with scope(_ran, ran):
        yield ran


@contextmanager
def meta_as_gpu() -> Iterator[None]:
    """Inside the ``with`` block, choose for tensors on the "meta" device as on a GPU: their kernels are only listed."""
    with scope(_meta_as_gpu, True):
        yield


def on_gpu(x: pytorch.Tensor) -> bool:
    """Return whether a tensor is on a GPU, or is on the "meta" device inside `meta_as_gpu()`."""
    return x.is_cuda or (x.is_meta and _meta_as_gpu.get())


def same_backend() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """A `context_fn` for `torch.utils.checkpoint`: recompute with the backend, and the `deterministic` mode, of now."""
    return nullcontext(), _Reentrant(_chosen.get(), is_deterministic())


class _Reentrant(AbstractContextManager[None]):
    """A backend and a mode as a reentrant context manager: every backward pass through a checkpoint enters it again."""

    def __init__(self, name: str, mode: bool):
        self.name, self.mode = name, mode
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        self._entered.append(ExitStack())
        self._entered[-1].enter_context(backend(self.name))
        self._entered[-1].enter_context(deterministic(self.mode))

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


class Op:
    """The implementations of one op, all of which take the same arguments.

    Args:
        name: Name of the op.
        reference: The formula in fp32, in loops.
        torch: The implementation in PyTorch, for any device.
        gpu: The implementation in Triton as "module:function", imported on first use: not every platform has Triton.
        limits: Of the same arguments: why the Triton kernels cannot take them, as a relative clause ("which takes …");
            None if they can.
    """

    def __init__(
        self,
        name: str,
        *,
        reference: Implementation,
        torch: Implementation,
        gpu: str | None = None,
        limits: Callable[..., str | None] | None = None,
    ):
        self.name, self.limits = name, limits
        every = {"triton": gpu, "torch": torch, "reference": reference}
        self.implementations = {backend: one for backend, one in every.items() if one is not None}

    def __call__(self, x: Tensor, *args: Any) -> Any:
        """Run the implementation for the device of `x`, one of the arguments, under the backend in force.

        Raises:
            UserError: That backend cannot run the op.
        """
        return self.choose(x, *args)(*args)

    def choose(self, x: Tensor, *args: Any) -> Implementation:
        return self.load(self.backend(x, *args))

    def load(self, backend: str) -> Implementation:
        implementation = self.implementations[backend]
        return loaded(implementation) if isinstance(implementation, str) else implementation

    def backend(self, x: Tensor, *args: Any) -> str:
        """Return the backend of a call; without `args`, of one within the limits."""
        limits = self.limits(*args) if args and self.limits is not None else None
        fp64 = x.dtype == pytorch.float64
        device = "cuda" if on_gpu(x) else x.device.type
        name = _choose(self.name, tuple(self.implementations), device, fp64, limits)
        if x.is_cuda and name == "torch" and "triton" in self.implementations and not pytorch.compiler.is_compiling():
            reason = _no_triton("cuda", fp64, limits)
            if reason and _chosen.get() == "auto":
                _say(self.name, x.shape[-1], reason)
        return name


@cache  # warns once, however many batch sizes and lengths there are
def _say(op: str, channels: int, reason: str) -> None:
    log.warning("%s of %d channels runs in PyTorch, not on 'triton', %s", op, channels, reason)


def _choose(op: str, implemented: tuple[str, ...], device: str, fp64: bool, limits: str | None) -> str:
    name = _chosen.get()
    if name not in BACKENDS:
        raise UserError(f"ZOO_BACKEND: {name!r} is not one of {', '.join(BACKENDS)}")
    reason = _no_triton(device, fp64, limits)
    if name == "auto":
        name = "triton" if "triton" in implemented and device == "cuda" and not reason else "torch"
    if name not in implemented or (name == "triton" and reason):
        lacks = f"cannot run on 'triton', {reason}" if name in implemented else f"has no {name!r} implementation"
        others = ", ".join(other for other in implemented if other != name)
        raise UserError(f"backend: {op} {lacks}; choose one of {others} or auto")
    ran = _ran.get()
    if ran is not None:
        ran.setdefault(op, set()).add(name)
    return name


def _no_triton(device: str, fp64: bool, limits: str | None) -> str | None:
    """Why the Triton kernels cannot run; None if they can."""
    if fp64:
        return "which computes in fp32, with tensors in fp64"
    if device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"which needs a GPU or TRITON_INTERPRET=1, with tensors on {device}"
    return limits if has_triton() else "which is not installed"


@cache
def has_triton() -> bool:
    """Return whether Triton is installed."""
    return find_spec("triton") is not None


_functions = SimpleNamespace()  # by path; attributes, which the compiler reads only after `_load`


def loaded(path: str) -> Implementation:
    """The function "module:function"."""
    name = path.replace(".", "_").replace(":", "_")
    _load(path, name)
    function: Implementation = getattr(_functions, name)
    return function


def _load(path: str, name: str) -> None:
    if not hasattr(_functions, name):
        module, _, function = path.partition(":")
        setattr(_functions, name, getattr(import_module(module), function))


# The attribute that torch.compiler.assume_constant_result sets, without importing the compiler, which can trace neither
# context variables nor imports.
_choose._dynamo_marked_constant = True  # type: ignore[attr-defined]
has_triton._dynamo_marked_constant = True  # type: ignore[attr-defined]
_load._dynamo_marked_constant = True  # type: ignore[attr-defined]
