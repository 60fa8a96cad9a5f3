"""Cheap results are recomputed in the backward pass instead of saved for it.

The result of a norm is as large as its input, and autograd would save both: the input for the norm, and the result for
the product that follows. Inside `recomputing()`, such an op notes how to recompute its result, and the op that would
save that result for its backward pass saves the note instead.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .deterministic import in_mode, is_deterministic
from .scope import scope


class _Note:
    """One result that can be recomputed."""

    def __init__(self, y: Tensor, make: Callable[..., Tensor], args: list[Any]):
        # held until `recomputing()` exits, so that no other tensor can get its address
        self.y: Tensor | None = y
        self.version, self.make, self.args, self.mode = y._version, make, args, is_deterministic()
        self.users = self.waiting = 0
        self.value: Tensor | None = None

    def is_of(self, x: Tensor) -> bool:
        """Return whether x is the result, or a view of the whole result."""
        y = self.y
        if y is None or x.data_ptr() != y.data_ptr():
            return False
        return (x.numel(), x.dtype, x._version) == (y.numel(), y.dtype, self.version)

    def used(self) -> None:
        """Count a user, the first of which will also need what the result is made of."""
        self.users += 1
        for x in self.args if self.users == 1 else ():
            if isinstance(x, _Later):
                x.note.used()


class _Later(NamedTuple):
    """A tensor that is kept as the note on how to recompute it."""

    note: _Note
    shape: torch.Size
    stride: tuple[int, ...]

    def now(self) -> Tensor:
        """The tensor, recomputed once for all users of the note and dropped when the last of them has received it."""
        note = self.note
        if note.value is None:
            args = [x.now() if isinstance(x, _Later) else x for x in note.args]
            note.value, note.waiting = in_mode(note.mode, note.make, *args), note.users
        value, note.waiting = note.value, note.waiting - 1
        if not note.waiting:
            note.value = None
        return value.as_strided(self.shape, self.stride)


_notes: ContextVar[dict[int, _Note] | None] = ContextVar("notes", default=None)
_allowed: ContextVar[bool] = ContextVar("allowed", default=True)


@contextmanager
def recomputing(allowed: bool = True) -> Iterator[None]:
    """Inside the ``with`` block, results of norms are recomputed in the backward pass. Gradients stay bitwise equal.

    Args:
        allowed: False for a block that is recomputed as a whole. Nothing is noted inside it then, not even under a
            nested `recomputing()`: autograd offers a tensor only to the innermost saved-tensor hooks, and these would
            keep every tensor that has no note.
    """
    if not (allowed and _allowed.get()):
        before = _allowed.set(False)
        try:
            yield
        finally:
            _allowed.reset(before)
        return
    notes: dict[int, _Note] = {}

    def pack(x: Tensor) -> Any:
        later = _later(x, notes)
        if later is None:
            # without its history: a result that an op saves for itself would hold that op, and the op the result
            return x.detach()
        later.note.used()
        return later

    def unpack(saved: Any) -> Tensor:
        return saved if isinstance(saved, Tensor) else saved.now()

    try:
        with scope(_notes, notes), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        for note in notes.values():
            note.y = None


def _later(x: Tensor, notes: dict[int, _Note]) -> _Later | None:
    """The tensor as a note on how to recompute it; None if there is none."""
    note = notes.get(x.data_ptr())
    return None if note is None or not note.is_of(x) else _Later(note, x.shape, x.stride())


def keeping() -> bool:
    """Return whether an op that makes a cheap result inside itself is to save it: in eager calls outside
    `recomputing()`.
    """
    return not torch.compiler.is_compiling() and _notes.get() is None


def _current() -> dict[int, _Note] | None:
    return None if torch.compiler.is_compiling() else _notes.get()


def noted(x: Tensor) -> bool:
    """Return whether a tensor is to be recomputed in the backward pass."""
    notes = _current()
    return notes is not None and _later(x, notes) is not None


def remake(y: Tensor, make: Callable[..., Tensor], *args: Any) -> Tensor:
    """Return y, noting that `make(*args)` recomputes it to the bit.

    Tensors in `args` must be saved anyway, or be recomputed themselves.
    """
    notes = _current()
    if notes is not None and y.requires_grad and y.is_contiguous() and y.numel():
        saved_args = [(_later(x, notes) or x.detach()) if isinstance(x, Tensor) else x for x in args]
        notes[y.data_ptr()] = _Note(y, make, saved_args)
    return y
