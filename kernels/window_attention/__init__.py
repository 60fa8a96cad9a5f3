"""Causal softmax attention, with or without a window."""

from torch import Tensor

from ..core.backend import Op
from . import candidates, reference, token
from .arguments import check
from .candidates import CANDIDATES
from .token import AttentionOps, KeyCache

OP = Op("window_attention", reference=reference.forward, torch=candidates.forward)

__all__ = ["CANDIDATES", "OP", "AttentionOps", "KeyCache", "window_attention"]


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window_size: int | None = None,
    first_key: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    log_decay: Tensor | None = None,
    cache: KeyCache | None = None,
) -> Tensor:
    """Causal softmax attention of T queries over S ≥ T keys, with the last query aligned to the last key.

    More keys than queries mean a cache, whose keys come first, in chronological order. H query heads share Hkv
    key-value heads in order (grouped-query attention).

    Args:
        q: Queries [B,T,H,D].
        k: Keys [B,S,Hkv,D].
        v: Values [B,S,Hkv,V].
        window_size: How many keys a query sees, including its own; None for all.
        first_key: Index [B] of the first valid key of each row, for caches that are not full yet.
        scale: Factor on the scores; D^-½ by default.
        cu_seqlens: Boundaries [N+1] of documents packed into one row (B = 1, S = T), from 0 to T.
        log_decay: Log decays [B,S,H], ≤ 0, in any floating-point dtype: the score of query i and key j gets the sum of
            those of the tokens j + 1 … i (arXiv 2503.02130). −∞, like every log decay below −10,000, is a reset: its
            token and later ones see no earlier key, whatever the scores. Positive ones are refused on a CPU, undefined
            elsewhere. None for none.
        cache: Earlier tokens [B,R,…], with room for one more: q, k, v and log_decay are those of one new token per row
            (T = S = 1), which is written into the cache and sees at most R tokens. `cache.seen` stays. All is cast to
            the dtypes of the cache, without gradients. On a GPU, a call takes two launches, and only reads what it
            attends to. With `cache.ops`, these also compute norms, positions, decays and an output gate.

    Returns:
        o [B,T,H,V] in the dtype of v, or of autocast where that is on (except for fp64); 0 for a query without a valid
        key.

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """
    a = check(q, k, v, window_size, first_key, scale, cu_seqlens, log_decay)
    if cache is not None:
        return token.attend(token.check_cache(a, window_size, cache, scale))
    o: Tensor = OP(v, a)
    return o
