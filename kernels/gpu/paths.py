"""Choice among the ways to run an op on a GPU: a list of `KernelPath`s per op, of which the first match runs."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class KernelPath(NamedTuple):
    """One way to run an op: some kernels, in some order."""

    name: str
    when: Callable[[Any], bool]  # of the op's `Case`, the quantities that the choice depends on
    why: str  # the condition and the reason, for people
    kernels: tuple[str, ...] = ()  # what it launches, in order


def select(paths: Sequence[KernelPath], case: Any) -> KernelPath:
    """Return the first path that takes this case; the last one takes all."""
    for path in paths[:-1]:
        if path.when(case):
            return path
    return paths[-1]


def always(case: Any) -> bool:
    """Return True: the condition of a path that takes every case."""
    return True
