"""The arguments of window attention, checked once."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..core.autocast import autocast_dtype
from ..core.documents import Documents, documents
from ..core.recurrence import check_decay, check_scale
from ..core.tensors import check_tensors


@dataclass(frozen=True)
class Attention:
    """Checked arguments: T queries over S ≥ T keys, with the last query aligned to the last key."""

    q: Tensor  # [B,T,H,D]
    k: Tensor  # [B,S,Hkv,D]
    v: Tensor  # [B,S,Hkv,V]
    window_size: int | None
    first_key: Tensor | None  # [B]
    scale: float
    documents: Documents | None
    cu_seqlens: Tensor | None  # [N+1]
    log_decay: Tensor | None = None  # [B,S,H]

    def part(self, rows: slice | list[int], queries: slice, keys: slice) -> "Attention":
        """Return the call of some rows, queries and keys, all of which are valid and of one document."""
        q, k, v = self.q[rows, queries], self.k[rows, keys], self.v[rows, keys]
        log_decay = None if self.log_decay is None else self.log_decay[rows, keys]
        return replace(self, q=q, k=k, v=v, log_decay=log_decay, first_key=None, documents=None, cu_seqlens=None)


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window_size: int | None,
    first_key: Tensor | None,
    scale: float | None,
    cu_seqlens: Tensor | None,
    log_decay: Tensor | None = None,
) -> Attention:
    """Check shapes, dtypes and devices; every message starts with the argument's name.

    Raises:
        ValueError: An argument does not fit the others.
    """
    check_tensors(q=q, k=k, v=v, first_key=first_key, cu_seqlens=cu_seqlens, log_decay=log_decay)
    if q.dim() != 4 or not q.shape[1] or not q.is_floating_point():
        raise ValueError(f"q: expected a floating [B,T,H,D] with T ≥ 1, got {q.dtype} {tuple(q.shape)}")
    B, T, H, D = q.shape
    if k.dim() != 4 or k.shape[0] != B or k.shape[3] != D or k.shape[1] < T:
        raise ValueError(f"k: expected [{B},S,Hkv,{D}] with S ≥ {T}, got shape {tuple(k.shape)}")
    if not k.shape[2] or H % k.shape[2]:
        raise ValueError(f"k: {k.shape[2]} key heads do not divide the {H} heads of q")
    if v.dim() != 4 or v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v: expected {[*k.shape[:3]]} and any size, as k has, got shape {tuple(v.shape)}")
    if log_decay is not None and (log_decay.shape != (B, k.shape[1], H) or not log_decay.is_floating_point()):
        expected = f"a floating-point [{B},{k.shape[1]},{H}]"
        raise ValueError(f"log_decay: expected {expected}, got {log_decay.dtype} {tuple(log_decay.shape)}")
    if window_size is not None and (isinstance(window_size, bool | float) or window_size < 1):
        raise ValueError(f"window_size: {window_size} must be a whole number from 1 (the token itself), or None")
    if cu_seqlens is not None and (k.shape[1] != T or first_key is not None):
        raise ValueError("cu_seqlens: packed documents allow neither more keys than queries nor first_key")
    if first_key is not None and (first_key.shape != (B,) or first_key.dtype not in (torch.int32, torch.int64)):
        raise ValueError(f"first_key: expected an integer [{B}], got {first_key.dtype} {tuple(first_key.shape)}")
    for name, x in dict(k=k, v=v, first_key=first_key, log_decay=log_decay).items():
        if x is not None and x.device != q.device:
            raise ValueError(f"{name}: is on {x.device}, but q is on {q.device}")
        if x is not None and name in "kv" and x.dtype != q.dtype:
            raise ValueError(f"{name}: is {x.dtype}, but q is {q.dtype}")
    if (dtype := autocast_dtype(q.device)) is not None and q.dtype != torch.float64:  # as PyTorch's attention does
        q, k, v = (x.to(dtype) for x in (q, k, v))
    if log_decay is not None and T > 1:  # as in recurrences, which do not check those of a step
        check_decay(log_decay)
    if scale is None:
        scale = D**-0.5
    else:
        check_scale(scale)
        if scale <= 0:  # PyTorch's kernels multiply masked scores, which are −inf, by the scale
            q, scale = (-q, -scale) if scale else (q * 0, 1.0)
    docs = documents(cu_seqlens, T, B, q.device) if cu_seqlens is not None else None
    window = None if window_size is None or window_size >= k.shape[1] else window_size
    return Attention(q, k, v, window, first_key, scale, docs, cu_seqlens, log_decay)
