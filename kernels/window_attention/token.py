"""Attention of one new token per row to earlier ones, in caches with room for more.

The entry of token t is at index t mod R of a cache [B,R,…], so nothing moves when a token is added. A cache that grows
has more entries than tokens; one of a window needs no more entries than the window has tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.backend import Op
from ..core.deterministic import is_deterministic
from ..core.tensors import check_tensors
from . import candidates, reference
from .arguments import Attention

LARGEST_KEY, LARGEST_VALUE = 1024, 512  # of the Triton kernels, which hold a query and an output in registers


class KeyCache(NamedTuple):
    """Earlier tokens: that of number t is at index t mod R."""

    entries: tuple[Tensor, ...]  # keys [B,R,Hkv,D], values [B,R,Hkv,V], and log decays [B,R,H] if scores decay
    seen: Tensor  # [B] int64: number of earlier tokens of each row
    following: Tensor | None = None  # [B] int64, in other memory: becomes seen + 1; None if that is not needed


@dataclass(frozen=True)
class TokenAttention:
    """Checked arguments: one query, key and value per row, in the dtype of the caches."""

    q: Tensor  # [B,1,H,D]
    new: tuple[Tensor, ...]  # the entries of the new token, as those of the cache
    cache: KeyCache
    window: int  # ≤ R: tokens that a query sees, including its own
    scale: float


def check_cache(a: Attention, window_size: int | None, cache: KeyCache) -> TokenAttention:
    """Check a cache against the other arguments, which are checked already.

    Raises:
        ValueError: It does not fit them; the message starts with "cache".
    """
    decays = () if a.log_decay is None else (a.log_decay,)
    new, B = (a.k, a.v, *decays), len(a.q)
    if a.q.shape[1] != 1 or a.k.shape[1] != 1 or a.first_key is not None or a.cu_seqlens is not None:
        raise ValueError("cache: expected one token of each row, without first_key and cu_seqlens")
    if len(cache.entries) != len(new):
        raise ValueError(f"cache: expected {len(new)} entries, as there are new ones, got {len(cache.entries)}")
    check_tensors(**{"cache.seen": cache.seen}, **{f"cache.entries[{i}]": x for i, x in enumerate(cache.entries)})
    if cache.seen.shape != (B,) or cache.seen.dtype != torch.int64 or cache.seen.device != a.q.device:
        actual = f"{cache.seen.dtype} {tuple(cache.seen.shape)} on {cache.seen.device}"
        raise ValueError(f"cache.seen: expected an int64 [{B}] on {a.q.device}, got {actual}")
    after = cache.following
    if after is not None and (after.shape, after.dtype, after.device) != (cache.seen.shape, torch.int64, a.q.device):
        actual = f"{after.dtype} {tuple(after.shape)} on {after.device}"
        raise ValueError(f"cache.following: expected an int64 [{B}] on {a.q.device}, got {actual}")
    size = cache.entries[0].shape[1] if cache.entries[0].dim() > 1 else 0
    for number, (x, y) in enumerate(zip(cache.entries, new, strict=True)):
        expected = (B, max(size, 1), *y.shape[2:])
        if x.shape != expected or x.device != y.device or not x.is_floating_point():
            actual = f"{x.dtype} {tuple(x.shape)} on {x.device}"
            raise ValueError(f"cache.entries[{number}]: expected floats {[*expected]} on {y.device}, got {actual}")
    if cache.entries[1].dtype != cache.entries[0].dtype:
        raise ValueError(f"cache: has keys in {cache.entries[0].dtype}, but values in {cache.entries[1].dtype}")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (a.q, *new)):
        raise ValueError("cache: is written in place, and has no gradients; use torch.no_grad()")
    q, new = a.q.to(cache.entries[0].dtype), tuple(x.to(y.dtype) for x, y in zip(new, cache.entries, strict=True))
    return TokenAttention(q, new, cache, size if window_size is None else min(window_size, size), a.scale)


def composed(run: Callable[[Attention], Tensor], a: TokenAttention) -> Tensor:
    """o [B,1,H,V] in PyTorch: write the new entries, and attend to a copy of all that a query may see."""
    seen = a.cache.seen
    rows, size = torch.arange(len(a.q), device=seen.device), a.cache.entries[0].shape[1]
    for x, new in zip(a.cache.entries, a.new, strict=True):
        x[rows, seen % size] = new[:, 0]
    if a.cache.following is not None:
        torch.add(seen, 1, out=a.cache.following)
    token = seen[:, None] + torch.arange(1 - a.window, 1, device=seen.device)
    k, v, *decays = (x[rows[:, None], token % size] for x in a.cache.entries)
    first = (a.window - 1 - seen).clamp(min=0)
    return run(Attention(a.q, k, v, None, first, a.scale, None, None, *decays))


def limits(a: TokenAttention) -> str | None:
    """Return why the Triton kernels cannot compute a call; None if they can."""
    k, v, *decays = a.cache.entries
    if a.q.shape[3] > LARGEST_KEY or v.shape[3] > LARGEST_VALUE:
        return f"whose heads have at most {LARGEST_KEY} channels of keys and {LARGEST_VALUE} of values"
    whole = all(x.stride(3) == 1 and (x.shape[2] == 1 or x.stride(2) == x.shape[3]) for x in (k, v))
    whole &= all(x.stride(2) == 1 for x in decays)
    if not whole or any(len(x) > 1 and x.stride(0) != x.shape[1] * x.stride(1) for x in (k, v, *decays)):
        return "which needs caches whose entries are contiguous and follow each other"
    return None


OP = Op(
    "window_attention_token",
    reference=partial(composed, reference.forward),
    torch=partial(composed, candidates.forward),
    gpu="kernels.window_attention.gpu.token:forward",
    limits=limits,
)


def attend(a: TokenAttention) -> Tensor:
    """o [B,1,H,V] in the dtype of the caches; deterministic mode computes it as without a cache."""
    o: Tensor = composed(candidates.forward, a) if is_deterministic() else OP(a.q, a)
    return o
