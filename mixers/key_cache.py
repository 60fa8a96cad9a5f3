"""Attention over what is remembered of each token: whole sequences, parts of them, and caches that grow.

A stream is a tensor [B,T,…] with an entry for each token, such as keys, values or decays. `run` attends with queries
[B,T,H,D] to streams [B,S,…] of S ≥ T tokens, of which the last T are those of the queries. It takes the queries, the
streams, and by name what `kernels.window_attention` calls `first_key` and `cu_seqlens`.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels

from .context_parallel import ContextParallel

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
    caches: Sequence[Tensor],
    seen: Tensor,
    window_size: int | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, list[Tensor]]:
    """Attend to the caches and the new tokens.

    Args:
        run: Attention; see the top of this module.
        q: Queries [B,T,H,D].
        streams: The new tokens [B,T,…].
        caches: Earlier tokens [N,S,…], flush right, one for each stream.
        seen: Number of earlier tokens of each sequence [N].
        window_size: How many tokens a query sees, including the last one; None for all.
        cu_seqlens: Boundaries [N+1] of packed documents; None if each row is a sequence.

    Returns:
        o [B,T,H,V], and the next caches: window_size − 1 tokens, or all.
    """
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
