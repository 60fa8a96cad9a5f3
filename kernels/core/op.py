"""An op: a public function with several implementations, one of which is chosen at each call."""

from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from .backend import chosen

Implementation = Callable[..., Any]


class Op:
    """The implementations of one op, all of which take the same arguments.

    Args:
        name: Name of the op.
        reference: The formula in fp32, in loops.
        torch: The implementation in PyTorch, for any device.
        gpu: The implementation in Triton as "module:function", imported on first use: not every platform has Triton.
        limits: Of the same arguments: why the Triton kernels cannot take them, as a relative clause ("which takes …");
            None if they can.
        flashqla: The implementation by FlashQLA, as `gpu`.
    """

    def __init__(
        self,
        name: str,
        *,
        reference: Implementation,
        torch: Implementation,
        gpu: str | None = None,
        limits: Callable[..., str | None] | None = None,
        flashqla: str | None = None,
    ):
        self.name, self.limits = name, limits
        every = {"triton": gpu, "torch": torch, "reference": reference, "flashqla": flashqla}
        self.implementations = {backend: one for backend, one in every.items() if one is not None}

    def __call__(self, x: Tensor, *args: Any) -> Any:
        """Run the implementation for the device of `x`, one of the arguments, under the backend in force.

        Raises:
            UserError: That backend cannot run the op.
        """
        return self.choose(x, *args)(*args)

    def choose(self, x: Tensor, *args: Any) -> Implementation:
        """Return the implementation that a call runs."""
        return self.load(self.backend(x, *args))

    def load(self, backend: str) -> Implementation:
        """Return the implementation of a backend."""
        implementation = self.implementations[backend]
        return loaded(implementation) if isinstance(implementation, str) else implementation

    def backend(self, x: Tensor, *args: Any) -> str:
        """Return the backend of a call; without `args`, of one within the limits."""
        limits = self.limits(*args) if args and self.limits is not None else None
        return chosen(self.name, tuple(self.implementations), x, limits)


def loaded(path: str) -> Implementation:
    """The function "module:function"."""
    _load(path)
    function: Implementation = getattr(_functions, _attribute(path))
    return function


def _load(path: str) -> None:
    if not hasattr(_functions, _attribute(path)):
        module, _, name = path.partition(":")
        setattr(_functions, _attribute(path), getattr(import_module(module), name))


def _attribute(path: str) -> str:
    return path.replace(".", "_").replace(":", "_")


_functions = SimpleNamespace()  # by path; attributes, which the compiler reads only after `_load`
# as in `backend.py`: the compiler cannot trace the import
_load._dynamo_marked_constant = True  # type: ignore[attr-defined]
