"""Recurrent states outside a model: saved, loaded, joined into a batch, and taken apart again.

A state is a pytree of tensors whose first axis is the batch. If a state grows, its entries are along the second axis,
the newest last.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from kernels import UserError
from kernels.core.torch_internals import tree_flatten, tree_leaves, tree_map, tree_unflatten
from mixers.key_cache import in_slots, out_of_slots
from mixers.state import Slots, positions_seen, slotted
from zoo.files.atomic import atomic_write
from zoo.files.hashing import digest
from zoo.lm.model import LanguageModel

_HASH = "xxh3_128"  # of the file, with zeros in its place
_NO_HASH = "0" * 32
_PLACE = re.compile(rf'"{_HASH}":"([0-9a-f]{{32}})"'.encode())


def save_state(state: Any, path: str | Path) -> None:
    """Write a state to a safetensors file, with a hash of the file in its metadata."""
    leaves = {str(number): leaf.contiguous() for number, leaf in enumerate(tree_leaves(state))}
    content = save(leaves, metadata={_HASH: _NO_HASH})
    with atomic_write(path) as file:
        file.write(_with_hash(content, digest(content)))


def load_state(model: LanguageModel, path: str | Path) -> Any:
    """Read a state that was saved from a model of the same shape.

    Raises:
        UserError: The file is missing or damaged, or holds the state of another model.
    """
    try:
        content = Path(path).read_bytes()
        blank = _with_hash(content, _NO_HASH)
        if blank == content or _with_hash(blank, digest(blank)) != content:
            raise UserError(f"state: {path} is damaged, or not written by save_state: it lacks the hash of its bytes")
        leaves = load(content)
    except (SafetensorError, OSError) as error:
        raise UserError(f"state: {path} cannot be read as a state: {error}") from None
    initial, structure = tree_flatten(model.init_state(1))
    if len(initial) != len(leaves):
        raise UserError(f"state: {path} has {len(leaves)} tensors, the model's state has {len(initial)}")
    saved = [leaves[str(number)].to(leaf.device) for number, leaf in enumerate(initial)]
    for old, new in zip(initial, saved, strict=True):
        # the batch may have any size, and a state that grows any length
        if old.dim() != new.dim() or old.shape[2:] != new.shape[2:]:
            raise UserError(
                f"state: {path} has a tensor of shape {tuple(new.shape)}, the model's is {tuple(old.shape)}"
            )
    return tree_unflatten(saved, structure)


def _with_hash(content: bytes, hash_: str) -> bytes:
    """The content of a file with another hash in its metadata; unchanged if it has none."""
    match = _PLACE.search(content, 0, 8 + int.from_bytes(content[:8], "little"))  # the header follows its length
    return content if match is None else content[: match.start(1)] + hash_.encode() + content[match.end(1) :]


def join_states(states: Sequence[Any]) -> Any:
    """One state with all sequences of `states`, in order; those that grow are padded in front to the longest."""
    return tree_map(_cat, *states)


def take_states(state: Any, rows: Sequence[int] | Tensor) -> Any:
    """The state of some sequences; to branch, name a sequence more than once."""
    chosen = rows if isinstance(rows, Tensor) else torch.tensor(rows, dtype=torch.int64)
    return tree_map(lambda leaf: leaf[chosen.to(leaf.device)] if len(leaf) else leaf, state)


def growing(model: LanguageModel, state: Any) -> list[bool]:
    """Return for each tensor of a state after at least one token whether it grows with the tokens."""
    pairs = zip(tree_leaves(model.init_state(1, "meta")), tree_leaves(state), strict=True)
    return [initial.shape[1:2] != leaf.shape[1:2] for initial, leaf in pairs]


def grows_otherwise(model: LanguageModel, state: Any) -> bool:
    """Return whether a state after at least one token grows with the tokens, apart from what `with_room` converts."""
    initial = model.init_state(1, "meta")
    left = [tree_leaves(_converted(each, initial, lambda *_: ())) for each in (initial, state)]
    return any(before.shape[1:2] != leaf.shape[1:2] for before, leaf in zip(*left, strict=True))


def with_room(model: LanguageModel, state: Any, size: int) -> tuple[Any, bool]:
    """Convert the caches of a state that are typed `SlottedCache` into `Slots`, to which tokens are added in place.

    Args:
        model: The model.
        state: Its state, or one that this function returned, none of whose caches are left in the new one.
        size: Number of tokens for which caches that grow have room; others have that of their window.

    Returns:
        The state, and whether it has caches that grow.
    """
    growing_sizes = []

    def convert(cache: Any, initial: Tensor, seen: Tensor) -> Slots:
        window = initial.shape[1]
        growing_sizes.append(window == 0)
        if not isinstance(cache, Slots):
            return in_slots(cache, seen, window + 1 if window else size)
        entries = cache.entries
        more = 0 if window else size - entries.shape[1]
        return Slots(F.pad(entries, (0, 0) * (entries.dim() - 2) + (0, more)) if more else entries.clone())

    return _converted(state, model.init_state(1, "meta"), convert), any(growing_sizes)


def without_room(model: LanguageModel, state: Any, length: int) -> Any:
    """Convert a state of `with_room` back, after `length` tokens of its longest sequence."""

    def convert(cache: Slots, initial: Tensor, seen: Tensor) -> Tensor:
        return out_of_slots(cache, seen, initial.shape[1] or length)

    return _converted(state, model.init_state(1, "meta"), convert)


def _converted(state: Any, initial: Any, convert: Callable[[Any, Any, Any], Any]) -> Any:
    """A state whose fields typed `SlottedCache` are converted.

    `initial` is a state before the first token; `convert` takes a field of both states, and the tokens seen [N].
    """
    if not isinstance(state, tuple):
        return state
    fields = getattr(state, "_fields", None)
    caches = slotted(state) if fields else []
    parts = [
        convert(part, before, positions_seen(state))
        if fields and fields[number] in caches
        else _converted(part, before, convert)
        for number, (part, before) in enumerate(zip(state, initial, strict=True))
    ]
    return type(state)(*parts) if fields else tuple(parts)


def _cat(*leaves: Tensor) -> Tensor:
    if leaves[0].dim() < 2:
        return torch.cat(leaves)
    longest = max(leaf.shape[1] for leaf in leaves)
    front = [(0, 0) * (leaf.dim() - 2) + (longest - leaf.shape[1], 0) for leaf in leaves]
    return torch.cat([F.pad(leaf, pad) for leaf, pad in zip(leaves, front, strict=True)])
