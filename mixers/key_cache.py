"""Attention over what is remembered of each token: whole sequences, parts of them, and caches that grow.

A stream is a tensor [B,T,…] with an entry for each token, such as keys, values or decays. `run` attends with queries
[B,T,H,D] to streams [B,S,…] of S ≥ T tokens, of which the last T are those of the queries. It takes the queries, the
streams, and by name what `kernels.window_attention` calls `first_key`, `cu_seqlens` and `cache`.

Decoding on a GPU replaces caches by `Slots`, which have room for later tokens, so that a step of one token moves
nothing. Then `run` takes the streams of that token, and a `kernels.KeyCache` of the streams of earlier ones.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels

from .context_parallel import ContextParallel
from .state import Slots

Run = Callable[..., Tensor]


def attend(
    run: Run,
    q: Tensor,
    streams: Sequence[Tensor],
    window_size: int | None,
    cu_seqlens: Tensor | None,
    context_parallel: ContextParallel | None,
) -> Tensor:
    """Attend within whole sequences, or from a part of each back to earlier parts, as far as the window reaches."""
    if context_parallel is None:
        return run(q, *streams, cu_seqlens=cu_seqlens)
    context_parallel.check(None, cu_seqlens)
    size = None if window_size is None else window_size - 1
    here, earlier = context_parallel.before(streams, size)
    longer = [torch.cat(both, 1) for both in zip(earlier, here, strict=True)]
    # the fastest kernels need as many queries as keys, so pad the queries and drop their outputs
    extra = earlier[0].shape[1]
    padded = F.pad(q, (0, 0, 0, 0, extra, 0))
    return run(padded, *longer, cu_seqlens=context_parallel.longer_documents(size))[:, extra:]


def attend_to_cache(
    run: Run,
    q: Tensor,
    streams: Sequence[Tensor],
    caches: Sequence[Tensor | Slots],
    seen: Tensor,
    window_size: int | None,
    cu_seqlens: Tensor | None,
    following: Tensor | None = None,
    ops: kernels.AttentionOps | None = None,
) -> tuple[Tensor, Sequence[Any]]:
    """Attend to the caches and the new tokens.

    Args:
        run: Attention; see the top of this module.
        q: Queries [B,T,H,D].
        streams: The new tokens [B,T,…].
        caches: Earlier tokens [N,S,…], flush right, one for each stream; or `Slots`, for one token of each sequence.
        seen: Number of earlier tokens of each sequence [N].
        window_size: How many tokens a query sees, including the last one; None for all.
        cu_seqlens: Boundaries [N+1] of packed documents; None if each row is a sequence.
        following: With `Slots`, where to write seen + 1, in the launch that attends; None if that is not needed.
        ops: With `Slots`, what `kernels.window_attention` computes of the token besides attention; see `takes_ops`.

    Returns:
        o [B,T,H,V], and the next caches: window_size − 1 tokens, or all; or the same `Slots`.
    """
    entries = tuple(x.entries if isinstance(x, Slots) else x for x in caches)
    if isinstance(caches[0], Slots):
        return run(q, *streams, cu_seqlens=cu_seqlens, cache=kernels.KeyCache(entries, seen, following, ops)), caches
    return _attend_to_cache(run, q, streams, entries, seen, window_size, cu_seqlens)


def takes_ops(attention: Run, cache: Tensor | Slots) -> bool:
    """Return whether attention takes `ops`: whether it is that of `kernels`, and called with one token in `Slots`."""
    return isinstance(cache, Slots) and attention is kernels.window_attention


def _attend_to_cache(
    run: Run,
    q: Tensor,
    streams: Sequence[Tensor],
    caches: Sequence[Tensor],
    seen: Tensor,
    window_size: int | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, list[Tensor]]:
    """The result of `attend_to_cache` for caches without room."""
    if cu_seqlens is None:
        o, longer = _extended(run, q, streams, caches, seen)
        return o, [_last(x, x.shape[1], window_size) for x in longer]
    outputs, rows = [], []
    spans = kernels.documents(cu_seqlens, q.shape[1]).spans
    size = caches[0].shape[1] + max(j - i for i, j in spans)
    for n, (i, j) in enumerate(spans):
        row, old = slice(n, n + 1), [x[n : n + 1].to(new.dtype) for x, new in zip(caches, streams, strict=True)]
        if j > i:
            o, old = _extended(run, q[:, i:j], [x[:, i:j] for x in streams], old, seen[row])
            outputs.append(o)
        rows.append([_last(x, size, window_size) for x in old])
    return torch.cat(outputs, 1), [torch.cat(parts) for parts in zip(*rows, strict=True)]


def _extended(
    run: Run, q: Tensor, streams: Sequence[Tensor], caches: Sequence[Tensor], seen: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """The outputs, and the caches with the new tokens."""
    empty = (caches[0].shape[1] - seen).clamp(min=0)
    longer = [torch.cat([old.to(new.dtype), new], 1) for old, new in zip(caches, streams, strict=True)]
    return run(q, *longer, first_key=empty), longer


def _last(cache: Tensor, size: int, window_size: int | None) -> Tensor:
    """The last `size` entries of a cache, flush right, or as many of them as the window needs."""
    size = size if window_size is None else window_size - 1
    length = cache.shape[1]
    if length < size:
        return F.pad(cache, [0, 0] * (cache.dim() - 2) + [size - length, 0])
    tail = cache[:, length - size :]
    return tail.clone() if length > 2 * size else tail  # a view keeps all of a long prompt in memory


def in_slots(cache: Tensor, seen: Tensor, size: int) -> Slots:
    """Copy the last entries of a cache [N,S,…], flush right, into slots [N,size,…] with room for more."""
    age = (seen[:, None] - 1 - torch.arange(size, device=seen.device)) % size
    return Slots(_at(cache, cache.shape[1] - 1 - age, age, seen))


def out_of_slots(slots: Slots, seen: Tensor, size: int) -> Tensor:
    """Copy the last entries of a cache with room into a cache [N,size,…], flush right."""
    age = torch.arange(size - 1, -1, -1, device=seen.device).expand(len(seen), -1)
    return _at(slots.entries, (seen[:, None] - 1 - age) % slots.entries.shape[1], age, seen)


def _at(cache: Tensor, index: Tensor, age: Tensor, seen: Tensor) -> Tensor:
    """The entries [N,R,…] at `index` [N,R], for tokens of these ages (0: newest); zeros before the first token."""
    exists = age < seen.clamp(max=cache.shape[1])[:, None]
    if not cache.shape[1]:
        return cache.new_zeros(*index.shape, *cache.shape[2:])
    rows = torch.arange(len(cache), device=cache.device)[:, None]
    chosen = cache[rows, index.clamp(min=0)]
    return chosen.masked_fill_(~exists.view(*exists.shape, *[1] * (cache.dim() - 2)), 0)
