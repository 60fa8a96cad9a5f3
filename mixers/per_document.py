"""Packed documents and states of unequal length for a mixer that only knows whole sequences."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import UserError
from kernels.core.documents import documents

from .state import caches, positions_seen


def per_document(
    mix: Callable[[Tensor, Any], tuple[Tensor, Any]], x: Tensor, state: Any, cu_seqlens: Tensor | None
) -> tuple[Tensor, Any]:
    """The `forward` of a mixer, by a function that mixes sequences of equal length and equal past.

    It is called once if all sequences are alike, and otherwise once for each document or row. That is simple and right,
    and as slow as it sounds: a mixer that is often trained on packed documents deserves a dedicated kernel.

    Args:
        mix: (x [B,T,hidden], state of B sequences or None) → (y [B,T,hidden], next state or None). What is typed
            `Cache` has exactly the entries that these sequences have, without padding.
        x: [B,T,hidden], or packed documents [1,T,hidden].
        state: None, or a NamedTuple whose fields have the sequences as their first axis; if one is a `Cache`, another
            is a `Position`, the number of tokens seen.
        cu_seqlens: Boundaries [N+1] of packed documents; None if there are none.

    Returns:
        y [B,T,hidden], and the next state of all sequences or None.
    """
    if cu_seqlens is None:
        spans, rows = [(0, x.shape[1])] * len(x), [x[i : i + 1] for i in range(len(x))]
        if state is None or len({*_seen(state)}) == 1:
            return mix(x, None if state is None else _cut(state))
    else:
        spans = documents(cu_seqlens, x.shape[1], len(x)).spans
        rows = [x[:, start:stop] for start, stop in spans]
    outputs, states = [], []
    for i, (row, (start, stop)) in enumerate(zip(rows, spans, strict=True)):
        y, part = row, None if state is None else _cut(state._make(field[i : i + 1] for field in state))
        if stop > start:
            y, part = mix(row, part)
        outputs.append(y)
        states.append(part)
    filled = [y for y, row in zip(outputs, rows, strict=True) if row.shape[1]]
    return torch.cat(filled, 0 if cu_seqlens is None else 1), None if state is None else _joined(states)


def _seen(state: Any) -> list[int]:
    """Return the number of tokens that each sequence has seen; [0] for a state without a Cache, where it does not
    matter.
    """
    if not caches(state):
        return [0]
    seen = positions_seen(state)
    if seen is None:
        raise UserError(f"state: {type(state).__name__} has a Cache, but no Position, the number of tokens seen [N].")
    return seen.tolist()


def _cut(state: Any) -> Any:
    """The state of sequences that have seen equally many tokens, without padding in front of their caches."""
    count = _seen(state)[0]
    names = caches(state)
    return state._replace(**{name: _last(getattr(state, name), count) for name in names})


def _last(cache: Tensor, count: int) -> Tensor:
    return cache[:, max(cache.shape[1] - count, 0) :]


def _joined(states: Sequence[Any]) -> Any:
    """One state, whose caches are padded in front to the longest."""
    names = caches(states[0])
    longest = {name: max(getattr(state, name).shape[1] for state in states) for name in names}
    padded = [
        state._replace(**{name: _padded(getattr(state, name), length) for name, length in longest.items()})
        for state in states
    ]
    return states[0]._make(torch.cat(fields) for fields in zip(*padded, strict=True))


def _padded(cache: Tensor, length: int) -> Tensor:
    return F.pad(cache, (0, 0) * (cache.dim() - 2) + (length - cache.shape[1], 0))
