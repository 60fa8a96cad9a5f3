"""Cheap results are recomputed in the backward pass instead of saved for it.

The result of a norm is as large as its input, and autograd would save both: the input for the norm, and the result for
the product that follows. Inside `recomputing()`, such an op notes how to recompute its result, and the op that would
save that result for its backward pass saves the note instead.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor


class _Note:
    """One result that can be recomputed."""

    def __init__(self, y: Tensor, make: Callable[[], Tensor]):
        # held until `recomputing()` exits, so that no other tensor can get its address
        self.y: Tensor | None = y
        self.version, self.make = y._version, make
        self.users = self.waiting = 0
        self.value: Tensor | None = None

    def is_of(self, x: Tensor) -> bool:
        """Whether x is the result, or a view of the whole result."""
        y = self.y
        return (
            y is not None
            and x.data_ptr() == y.data_ptr()
            and (x.numel(), x.dtype, x._version) == (y.numel(), y.dtype, self.version)
        )

    def again(self) -> Tensor:
        """The result, recomputed once for all users and dropped when the last of them has received it."""
        if self.value is None:
            self.value, self.waiting = self.make(), self.users
        value, self.waiting = self.value, self.waiting - 1
        if not self.waiting:
            self.value = None
        return value


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
        note = notes.get(x.data_ptr())
        if note is None or not note.is_of(x):
            return x
        note.users += 1
        return note, x.shape, x.stride()

    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        note, shape, stride = kept
        return note.again().as_strided(shape, stride)

    token = _notes.set(notes)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        _notes.reset(token)
        for note in notes.values():
            note.y = None


def remake(y: Tensor, make: Callable[..., Tensor], *given: Any) -> Tensor:
    """Return y, noting that `make(*given)` recomputes it to the bit. Tensors in `given` must be saved anyway."""
    notes = None if torch.compiler.is_compiling() else _notes.get()
    if notes is not None and y.requires_grad and y.is_contiguous() and y.numel():
        kept = [x.detach() if isinstance(x, Tensor) else x for x in given]
        notes[y.data_ptr()] = _Note(y, lambda: make(*kept))
    return y
