"""The fields of a state, distinguished by their types, so that code that does not know the mixer can read them.

The state of a mixer is a pytree of tensors, usually a NamedTuple. Annotate what the mixer remembers as `Tensor`, and
its bookkeeping as `History` or `Position`, also inside tuples. `Cache` is what has an entry for each token seen, and
`SlottedCache` one that only `attend_to_cache` reads:

    class MyState(NamedTuple):
        matrix: Tensor
        histories: tuple[History, ...]
        seen: Position
"""

from collections.abc import Iterator
from functools import cache
from types import UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from torch import Tensor

from kernels import UserError
from kernels.core.torch_internals import tree_leaves


class Bookkeeping:
    """Marks the type of tensors in a state that do not count as memory of the mixer."""


class Count(Bookkeeping):
    """Marks the type of the tensor that counts tokens."""


class Growing:
    """Marks the type of tensors in a state that have an entry for each token."""


class Slotted(Growing):
    """Marks the type of caches that only `attend_to_cache` reads, which also takes `Slots`."""


class Slots(NamedTuple):
    """A cache with room, to which a token is added in place: that of number t is at index t mod R."""

    entries: Tensor  # [N,R,…]


# entries of the tokens seen [N,S,…], or of the last of them, newest last; padded in front for those who saw fewer
Cache = Annotated[Tensor, Growing()]
SlottedCache = Annotated[Tensor, Slotted()]  # in decoding, it may be `Slots`
History = Annotated[Tensor, Bookkeeping()]  # the last inputs of a convolution [N,W−1,C]
Position = Annotated[Tensor, Count()]  # tokens seen [N], int64


def remembered(state: Any, annotation: Any = None) -> Iterator[Tensor]:
    """Yield the tensors of a state that `TokenMixer.state_size` counts: those in floating point, except bookkeeping.

    `annotation` is the type of the state, if it is a field of a NamedTuple.
    """
    if _is_bookkeeping(annotation):
        return
    if isinstance(state, Tensor):
        if state.is_floating_point():
            yield state
        return
    if hasattr(state, "_fields"):
        types = _field_types(state.__class__)
        parts = [(part, types.get(field)) for field, part in zip(state._fields, state, strict=True)]
    elif isinstance(state, tuple | list):
        parts = list(zip(state, _item_types(annotation, state), strict=True))
    else:
        parts = [(leaf, None) for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
    for part, part_annotation in parts:
        yield from remembered(part, part_annotation)


def _is_bookkeeping(annotation: Any) -> bool:
    if get_origin(annotation) in (Union, UnionType):
        return any(map(_is_bookkeeping, get_args(annotation)))
    return _is_marked(annotation, Bookkeeping)


def _item_types(annotation: Any, items: tuple[Any, ...] | list[Any]) -> tuple[Any, ...]:
    """The annotation of each item of a tuple or list; None where `annotation` does not say."""
    inner = tuple(argument for argument in get_args(annotation) if argument is not Ellipsis)
    return inner if len(inner) == len(items) else (inner[0] if len(inner) == 1 else None,) * len(items)


@cache
def _field_types(state: type) -> dict[str, Any]:
    try:
        return get_type_hints(state, include_extras=True)
    except NameError as error:
        raise UserError(f"state: the annotations of {state.__name__} cannot be read: {error}") from None


def caches(state: Any) -> list[str]:
    """The fields of a NamedTuple that are typed `Cache` or `SlottedCache`."""
    return _marked(state, Growing)


def slotted(state: Any) -> list[str]:
    """The fields of a NamedTuple that are typed `SlottedCache`."""
    return _marked(state, Slotted)


def positions_seen(state: Any) -> Tensor | None:
    """The field of a NamedTuple that is typed `Position`; None if there is none."""
    names = _marked(state, Count)
    return getattr(state, names[0]) if names else None


def _marked(state: Any, mark: type) -> list[str]:
    return [name for name, annotation in _field_types(state.__class__).items() if _is_marked(annotation, mark)]


def _is_marked(annotation: Any, mark: type) -> bool:
    return any(isinstance(each, mark) for each in getattr(annotation, "__metadata__", ()))
