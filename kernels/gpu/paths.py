"""Choice among the ways to run an op on a GPU: lists of `KernelPath`s, of which the first match runs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class KernelPath(NamedTuple):
    """One way to run an op, or one stage of it."""

    name: str
    when: Callable[[Any], bool]  # of the quantities that the choice depends on: the op's `Case`, or its arguments
    why: str  # the condition, and the reason for it, for people


@dataclass
class Record:
    """Paths and launches of a dry run, in order."""

    paths: list[KernelPath] = field(default_factory=list)
    launches: list[Any] = field(default_factory=list)


record: Record | None = None


@contextmanager
def dry_run() -> Iterator[Record]:
    """Inside the ``with`` block, launches of all threads are only listed; the tensors may be on the "meta" device."""
    global record
    outer, record = record, Record()
    try:
        yield record
    finally:
        record = outer


def select(paths: Sequence[KernelPath], case: Any) -> KernelPath:
    """Return the first path that takes this case; the last one takes all."""
    path = first_match(paths, case)
    note(path)
    return path


def first_match(paths: Sequence[KernelPath], case: Any) -> KernelPath:
    """Like `select`, but leave no trace in the record of a dry run: for asking ahead."""
    return next((path for path in paths[:-1] if path.when(case)), paths[-1])


def takes(path: KernelPath, case: Any) -> bool:
    """Return whether a path that is not part of a list takes this case."""
    if not path.when(case):
        return False
    note(path)
    return True


def note(path: KernelPath) -> None:
    """Add a path to the record of a dry run."""
    if record is not None and path not in record.paths:
        record.paths.append(path)


def always(case: Any) -> bool:
    """Return True: the condition of a path that takes every case."""
    return True
