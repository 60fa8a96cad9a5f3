"""Cheap results are recomputed in the backward pass instead of saved for it.

The result of a norm is as large as its input, and autograd would save both: the input for the norm, and the result for
the product that follows. Inside `recomputing()`, such an op notes how to recompute its result, and the op that would
save that result for its backward pass saves the note instead.

The result is recognised by identity. Autograd passes the tensor that an op saves to the hooks on saved tensors, which
compare it, or the tensor that it is a view of (`Tensor._base`), with the results: `x is y`. Any other tensor is saved,
also one that shares memory with a result but is not a view of it, such as `y.detach()`.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .deterministic import in_mode, is_deterministic
from .scope import scope


class _Kept(NamedTuple):
    """A tensor that is kept, and the version that it must still have when it is needed."""

    tensor: Tensor
    version: int

    def is_unchanged(self) -> bool:
        """Return whether the tensor was not changed in place since."""
        return _version(self.tensor) == self.version

    def now(self) -> Tensor:
        """The tensor; a RuntimeError, as autograd raises without hooks, if it was changed in place."""
        if not self.is_unchanged():
            raise RuntimeError(
                f"a tensor of shape {list(self.tensor.shape)} that the backward pass needs, perhaps to recompute a "
                f"result, was changed in place: its version is {_version(self.tensor)}, expected {self.version}"
            )
        return self.tensor


def _version(x: Tensor) -> int:
    """The number of changes in place; 0 for tensors of inference mode, which do not count them."""
    return 0 if x.is_inference() else x._version


class _Note:
    """One result that can be recomputed."""

    def __init__(self, y: Tensor, make: Callable[..., Tensor], args: list[Any]):
        self.result = weakref.ref(y)  # a strong reference would keep the memory that the note saves
        self.version, self.address = y._version, y.data_ptr()
        self.make, self.args, self.mode = make, args, is_deterministic()
        self.users = self.waiting = 0
        self.value: Tensor | None = None

    def later(self, x: Tensor) -> "_Later | None":
        """Return how to recompute x with this note.

        None if x is neither the result nor a view within it, or if the result was changed in place or got other memory
        (`y.data = …`), or if what it is made of was changed in place.
        """
        y = self.result()
        if y is None or y._version != self.version or y.data_ptr() != self.address or not self.is_unchanged():
            return None
        if x is y:
            return _Later(self, x.shape, x.stride(), 0)
        if x._base is not y or x.is_neg() or x.is_conj():
            return None
        shape, stride, start = x.shape, x.stride(), int(x.storage_offset() - y.storage_offset())
        last = start + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        inside = start >= 0 and last < y.numel() and x.dtype == y.dtype  # as_strided can leave y
        return _Later(self, shape, stride, start) if inside else None

    def is_unchanged(self) -> bool:
        """Return whether what the result is made of was not changed in place since."""
        return all(x.is_unchanged() for x in self.args if isinstance(x, _Kept | _Later))

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
    start: int  # of its first element in the result

    def is_unchanged(self) -> bool:
        """Return whether the tensor can still be recomputed."""
        return self.note.is_unchanged()

    def now(self) -> Tensor:
        """The tensor, recomputed once for all users of the note and dropped when the last of them has received it."""
        note = self.note
        if note.value is None:
            args = [x.now() if isinstance(x, _Kept | _Later) else x for x in note.args]
            note.value, note.waiting = in_mode(note.mode, note.make, *args), note.users
        value, note.waiting = note.value, note.waiting - 1
        if not note.waiting:
            note.value = None
        return value.as_strided(self.shape, self.stride, value.storage_offset() + self.start)


class _Active(NamedTuple):
    """The notes of a `recomputing()`, and its hook that looks them up."""

    notes: dict[int, _Note]
    pack: Callable[[Tensor], _Kept | _Later]


_active: ContextVar[_Active | None] = ContextVar("active", default=None)
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
        with scope(_allowed, False), scope(_active, None):
            yield
        return
    notes: dict[int, _Note] = {}  # by `id`; a result may be freed and its id reused, so `later` compares the objects

    def pack(x: Tensor) -> _Kept | _Later:
        later = _later(x, notes)
        if later is None:
            # without its history: a result that an op saves for itself would hold that op, and the op the result
            return _Kept(x if x.is_leaf else x.detach(), _version(x))
        later.note.used()
        return later

    def unpack(saved: _Kept | _Later) -> Tensor:
        return saved.now()

    try:
        with scope(_active, _Active(notes, pack)), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        notes.clear()  # autograd holds `pack` until the backward pass, and with it the arguments of every note


def _later(x: Tensor, notes: dict[int, _Note]) -> _Later | None:
    """Return how to recompute a tensor; None if it is not known."""
    for y in (x, x._base):  # the note of x's id may be of a result that was freed, while x is a view of another result
        note = None if y is None else notes.get(id(y))
        later = None if note is None else note.later(x)
        if later is not None:
            return later
    return None


def keeping() -> bool:
    """Return whether an op that makes a cheap result inside itself is to save it: in eager calls outside
    `recomputing()`.
    """
    return not torch.compiler.is_compiling() and _current() is None


def _current() -> dict[int, _Note] | None:
    """The notes of the `recomputing()` whose hooks receive what ops save.

    None outside, and inside other hooks. Those of `torch.utils.checkpoint` compare what ops save in the forward pass
    with what they save when it recomputes them, outside `recomputing()`.
    """
    active = None if torch.compiler.is_compiling() else _active.get()
    if active is None:
        return None
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return active.notes if hooks is not None and hooks[0] is active.pack else None


def noted(x: Tensor) -> bool:
    """Return whether a tensor is to be recomputed in the backward pass."""
    notes = _current()
    return notes is not None and _later(x, notes) is not None


def remake(y: Tensor, make: Callable[..., Tensor], *args: Any) -> Tensor:
    """Return y, noting that `make(*args)` recomputes it to the bit.

    Tensors in `args` must be saved anyway, or be recomputed themselves. If one of them is changed in place before an op
    saves y, y is saved; if later, the backward pass raises a RuntimeError. If y is a view, other views are not
    recognised.
    """
    notes = _current()
    if notes is not None and y.requires_grad and y.is_contiguous():
        saved_args = [
            (_later(x, notes) or _Kept(x.detach(), _version(x))) if isinstance(x, Tensor) else x for x in args
        ]
        notes[id(y)] = _Note(y, make, saved_args)
    return y


def unnoted(y: Tensor) -> Tensor:
    """Return y, which the ops that follow save for their backward passes, even if it could be recomputed."""
    notes = _current()
    if notes is not None:
        for x in (y, y._base):
            notes.pop(id(x), None)
    return y
