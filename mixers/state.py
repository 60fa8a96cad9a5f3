"""What the fields of a state are, told by their types, so that code that never asks which mixer it holds can read one.

The state of a mixer is a pytree of tensors, usually a NamedTuple. What the mixer remembers is annotated as `Tensor`;
what it keeps besides is annotated as `History` or `Position`, alone or inside a tuple, and counts for nothing:

    class MyState(NamedTuple):
        matrix: Tensor
        histories: tuple[History, ...]
        seen: Position
"""

from collections.abc import Iterator
from functools import cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from torch import Tensor
from torch.utils._pytree import tree_leaves

from kernels import UserError


class Bookkeeping:
    """Marks the type of a state's tensors that hold nothing that the mixer remembers."""


History = Annotated[Tensor, Bookkeeping()]  # the last inputs of a convolution [N,W−1,C]
Position = Annotated[Tensor, Bookkeeping()]  # tokens seen [N], int64


def remembered(state: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a state that `TokenMixer.state_size` counts: of floating point, and no bookkeeping.

    Args:
        state: Of a mixer, or a part of one.
        name: What the names begin with.

    Yields:
        The name of a tensor, such as `_matrix` or `_caches_0`, or none if the state is one tensor; and the tensor.

    Raises:
        UserError: The annotations of a NamedTuple cannot be read.
    """
    yield from _remembered(state, None, name)


def _remembered(state: Any, kind: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if _is_bookkeeping(kind):
        return
    if isinstance(state, Tensor):
        if state.is_floating_point():
            yield name, state
        return
    if hasattr(state, "_fields"):
        kinds = _field_types(state.__class__)
        parts = [(part, kinds.get(field), field) for field, part in zip(state._fields, state, strict=True)]
    elif isinstance(state, tuple | list):
        parts = [(part, kind, i) for i, (part, kind) in enumerate(zip(state, _item_types(kind, state), strict=True))]
    else:
        parts = [(leaf, None, i) for i, leaf in enumerate(tree_leaves(state)) if isinstance(leaf, Tensor)]
    for part, part_kind, key in parts:
        yield from _remembered(part, part_kind, f"{name}_{key}")


def _is_bookkeeping(kind: Any) -> bool:
    if get_origin(kind) in (Union, UnionType):
        return any(map(_is_bookkeeping, get_args(kind)))
    return any(isinstance(mark, Bookkeeping) for mark in getattr(kind, "__metadata__", ()))


def _item_types(kind: Any, items: tuple[Any, ...] | list[Any]) -> tuple[Any, ...]:
    """The types of the items of a tuple or list of type `kind`, which may say nothing about them."""
    inner = tuple(argument for argument in get_args(kind) if argument is not Ellipsis)
    return inner if len(inner) == len(items) else (inner[0] if len(inner) == 1 else None,) * len(items)


@cache
def _field_types(kind: type) -> dict[str, Any]:
    try:
        return get_type_hints(kind, include_extras=True)
    except NameError as error:
        raise UserError(f"state: the annotations of {kind.__name__} cannot be read: {error}") from None
