"""Forward FLOPs of the ops for one sequence, as the chunkwise algorithms run: products only, masked squares in full.

These are the counts of `torch.utils.flop_counter` on the ``torch`` backend (the mixers' conformance tests check that),
plus the small triangular solves of the delta rule, which it does not count, and the masked halves of squares with
decays per channel, which this backend does not compute (`core/pair_decays.py`); `as_computed` leaves these out.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from .core.chunking import CHUNK
from .core.scope import scope
from .delta_rule import delta_rule
from .delta_rule.chunk import SOLVED
from .linear_recurrence import linear_recurrence
from .value_decay_recurrence import value_decay_recurrence
from .window_attention.chunk import BLOCK, padded

_MASKED: ContextVar[bool] = ContextVar("masked", default=True)  # whether masked halves of squares count


@contextmanager
def as_computed() -> Iterator[None]:
    """Count inside the block what the ``torch`` backend computes, to compare it with a counter."""
    with scope(_MASKED, False):
        yield


def recurrence_flops(
    op: Callable[..., object],
    length: int,
    *,
    heads: int,
    key_heads: int,
    subheads: int,
    key_size: int,
    value_size: int,
    per_channel: bool = False,
    erase: bool = False,
    steps: int = 1,
) -> int:
    """FLOPs of a recurrence over `length` tokens.

    Args:
        op: `kernels.linear_recurrence`, `kernels.value_decay_recurrence` or `kernels.delta_rule`.
        length: Number of tokens.
        heads: Value heads H.
        key_heads: Key heads G, before subheads.
        subheads: Subheads E.
        key_size: Key size K of one recurrence.
        value_size: Value size V.
        per_channel: Whether the decay has a key axis.
        erase: Whether the delta rule has erase keys of its own, or reads before the decay.
        steps: Steps per token of the delta rule.

    Raises:
        ValueError: `op` is none of these.
    """
    C, E = min(CHUNK, length), subheads
    scores = key_heads * E * C * key_size  # Q Kᵀ
    state = heads * E * key_size * value_size
    halved = per_channel and not _MASKED.get()
    if op in (linear_recurrence, value_decay_recurrence):
        mixed = heads * C * value_size
        if per_channel:
            scores = heads * (E if op is linear_recurrence else 1) * C * key_size
        if halved and op is linear_recurrence:
            scores = heads * E * _pairs(C) * key_size // C
        elif halved:
            mixed = heads * _pairs(C) * value_size // C
        per_token = scores + mixed + 2 * state
    elif op is delta_rule and (per_channel or erase or steps > 1):
        size = min(max(1, CHUNK // steps), length)  # tokens of a chunk
        rows, inner = steps * size, size + steps * size  # rows that read the state: queries and erase keys
        own = rows * steps * key_size if steps > 1 else 0  # pairs inside a token
        pairs = _pairs(size) * steps * (1 + steps) if halved else inner * rows
        per_chunk = pairs * key_size + size * rows * value_size + rows**2 * value_size + _inverse(rows) + own
        chunks = -(-length // size)  # the last one is padded
        total = heads * E * per_chunk + size * (1 + 2 * steps) * state
        if not per_channel and not _MASKED.get():  # value heads with one key head share its products with queries
            total -= (heads - key_heads) * E * size * rows * key_size
        return 2 * chunks * total
    elif op is delta_rule:
        per_token = 2 * scores + heads * E * (2 * C * value_size + _inverse(C) // C) + 3 * state
    else:
        raise ValueError(f"op: {op!r} is not linear_recurrence, value_decay_recurrence or delta_rule of kernels")
    return 2 * per_token * length


def _pairs(tokens: int) -> int:
    """Pairs of two tokens of a chunk, which is padded to a power of two."""
    length = 1 << max(0, tokens - 1).bit_length()
    return length * (length - 1) // 2


def _inverse(size: int) -> int:
    """Multiplications in `unit_lower_inverse` of one [size,size] matrix."""
    if size <= SOLVED or size % 2:
        return size**3 // 2
    return 2 * _inverse(size // 2) + 2 * (size // 2) ** 3


def attention_flops(
    length: int, *, heads: int, head_dim: int, value_dim: int | None = None, window_size: int | None = None
) -> int:
    """FLOPs of `kernels.window_attention` over `length` tokens: the full square, or whole blocks of a window.

    Values have the size of keys, `head_dim`, where `value_dim` is None.
    """
    keys = length if window_size is None or window_size >= length else padded(window_size - 1) + BLOCK
    return 2 * heads * (head_dim + (head_dim if value_dim is None else value_dim)) * length * keys
