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
from .documents import version_of
from .scope import scope
from .torch_internals import saved_tensor_hooks


def _unchanged(x: Tensor, version: int) -> Tensor:
    """Return x, or raise a RuntimeError (as autograd does without hooks) if x was changed in place since a version."""
    if x._version != version:
        raise RuntimeError(
            f"a tensor of shape {list(x.shape)} that the backward pass needs, perhaps to recompute a result, was "
            f"changed in place: its version is {x._version}, expected {version}; change a copy of it instead"
        )
    return x


class _Note:
    """One result that can be recomputed."""

    def __init__(self, y: Tensor, make: Callable[..., Tensor], args: list[Any]):
        self.result = weakref.ref(y)  # a strong reference would keep the memory that the note saves
        self.version, self.address = y._version, y.data_ptr()
        self.make, self.args, self.mode = make, args, is_deterministic()
        self.versions = [version_of(x) if isinstance(x, Tensor) else None for x in args]
        self.users = self.waiting = 0
        self.value: Tensor | None = None

    def later(self, x: Tensor) -> "_Later | None":
        """Return how to recompute x with this note.

        None in four cases: x is neither the result nor a view within it; the result was changed in place; it got other
        memory (`y.data = …`); an argument was changed in place.
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
        """Return whether all arguments, and the arguments of those that are recomputed, are as they were."""
        return all(
            x.note.is_unchanged() if isinstance(x, _Later) else version is None or x._version == version
            for x, version in zip(self.args, self.versions, strict=True)
        )

    def compute(self) -> Tensor:
        """Recompute the result; raise a RuntimeError if an argument was changed in place."""
        args = [
            x.now() if isinstance(x, _Later) else x if version is None else _unchanged(x, version)
            for x, version in zip(self.args, self.versions, strict=True)
        ]
        return in_mode(self.mode, self.make, *args)

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

    def now(self) -> Tensor:
        """The tensor, recomputed once for all users of the note and dropped when the last of them has received it."""
        note = self.note
        if note.value is None:
            note.value, note.waiting = note.compute(), note.users
        value, note.waiting = note.value, note.waiting - 1
        if not note.waiting:
            note.value = None
        return value.as_strided(self.shape, self.stride, value.storage_offset() + self.start)


class _Active(NamedTuple):
    """The notes of a `recomputing()`, and its hook that looks them up."""

    notes: dict[int, _Note]
    pack: Callable[[Tensor], "tuple[Tensor, int] | _Later"]


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

    def pack(x: Tensor) -> tuple[Tensor, int] | _Later:
        later = _later(x, notes)
        if later is None:
            # without its history: a result that an op saves for itself would hold that op, and the op the result
            return (x if x.is_leaf else x.detach()), x._version
        later.note.used()
        return later

    def unpack(saved: tuple[Tensor, int] | _Later) -> Tensor:
        return saved.now() if isinstance(saved, _Later) else _unchanged(*saved)

    try:
        with scope(_active, _Active(notes, pack)), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        notes.clear()  # autograd holds `pack` until the backward pass, and with it the arguments of every note


def _later(x: Tensor, notes: dict[int, _Note]) -> _Later | None:
    """Return how to recompute a tensor; None if it is not known."""
    note = notes.get(id(x))
    later = None if note is None else note.later(x)
    if later is None and (base := x._base) is not None:  # perhaps that note is of a freed result that had the same id
        note = notes.get(id(base))
        later = None if note is None else note.later(x)
    return later


def keeping() -> bool:
    """Return whether an op that makes a cheap result inside itself is to save it: in eager calls outside
    `recomputing()`.
    """
    return not torch.compiler.is_compiling() and _current() is None


def _current() -> dict[int, _Note] | None:
    """Return the notes of the `recomputing()` whose hooks are the innermost ones, or None.

    Inside other hooks nothing may be noted: `torch.utils.checkpoint` requires that ops save the same tensors in the
    forward pass as when it recomputes them, outside `recomputing()`.
    """
    active = None if torch.compiler.is_compiling() else _active.get()
    if active is None:
        return None
    hooks = saved_tensor_hooks()
    return active.notes if hooks is not None and hooks[0] is active.pack else None


def noted(x: Tensor) -> bool:
    """Return whether a tensor is to be recomputed in the backward pass."""
    notes = _current()
    return notes is not None and _later(x, notes) is not None


def remake(y: Tensor, make: Callable[..., Tensor], *args: Any) -> Tensor:
    """Return y, noting that `make(*args)` recomputes it to the bit.

    Tensors in `args` must be saved anyway, or be recomputed themselves. If one of them is changed in place before an op
    saves y, y is saved; if later, the backward pass raises a RuntimeError. Changes through `.data` are not noticed.
    If y is a view, other views are not recognised.
    """
    notes = _current()
    if notes is not None and y.requires_grad and y.is_contiguous():
        saved_args = [(_later(x, notes) or x.detach()) if isinstance(x, Tensor) else x for x in args]
        notes[id(y)] = _Note(y, make, saved_args)
    return y


def unnoted(y: Tensor) -> Tensor:
    """Return y, which the ops that follow save for their backward passes, even if it could be recomputed."""
    notes = _current()
    if notes is not None:
        for x in (y, y._base):
            notes.pop(id(x), None)
    return y
