"""`read_only`: tensors that kernels may read before earlier kernels have finished.

A kernel that overlaps with the one in front of it (`kernels/gpu/overlap.py`) may not read what an earlier kernel could
still be writing. It cannot know which tensors those are, so it waits before it reads any, although weights do not
change while a model decodes. In a CUDA graph of decoding steps the wait for weights takes a sixth of the time.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from .scope import scope

_addresses: ContextVar[frozenset[int]] = ContextVar("read_only", default=frozenset())


@contextmanager
def read_only(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Promise that nothing writes to these tensors, or to views of them, while kernels launched inside the block run.

    Kernels launched before the block may still be running, so what they wrote is only complete after a synchronisation.
    If a CUDA graph is captured inside the block, the promise is about the kernels of a replay, which waits for all
    earlier ones: between replays anything may write.

    >>> with kernels.read_only(model.parameters()):
    ...     graph = capture(step)

    An inner block adds tensors to those of the outer one.

    Args:
        tensors: Such as the weights of a model, in memory before the block is entered.
    """
    addresses = {x.untyped_storage().data_ptr() for x in tensors} - {0}  # 0: those without memory
    with scope(_addresses, _addresses.get() | addresses):
        yield


def is_read_only(x: Tensor) -> bool:
    """Return whether x is one of the tensors of `read_only`, or a view of one."""
    addresses = _addresses.get()
    return bool(addresses) and x.untyped_storage().data_ptr() in addresses
