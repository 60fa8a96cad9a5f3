"""Attention with log decays in Triton: one launch for their sums and one for the outputs; three for all gradients.

There are no atomics, so results repeat to the bit.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.allocation import new
from ...core.autograd import Gradients, register
from ...core.documents import places
from ...gpu.launch import cdiv, enqueue
from ...gpu.launch_table import launch
from ...gpu.tiles import factor_dtype
from ..arguments import Attention
from .decays import differentiate_decays, sum_decays
from .kernels import by_keys, by_queries

WALK = {"BLOCK": 1024, "warps": 4}  # tokens of a step along time


class Arguments(NamedTuple):
    """The arguments of the op; without a window, `window` is the length of the row."""

    q: Tensor  # [B,T,H,D]
    k: Tensor  # [B,T,Hkv,D]
    v: Tensor  # [B,T,Hkv,V]
    log_decay: Tensor  # [B,T,H]
    cu_seqlens: Tensor | None
    window: int
    scale: float


def _empty(a: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised o [B,T,H,V], log-sum-exp [B,H,T] and table of tokens [B,H,T,4]."""
    B, T, H, _ = a.q.shape
    lse, tokens = (new(a.q, B, H, T, *four, dtype=torch.float32) for four in ((), (4,)))
    return new(a.q, B, T, H, a.v.shape[3]), lse, tokens


def _run(kernel: Any, name: str, a: Arguments, *tensors: Tensor | None) -> None:
    """Launch a kernel with an entry of the launch table."""
    (B, T, H, D), heads, V = a.q.shape, a.k.shape[2], a.v.shape[3]
    entry = launch(f"window_attention.{name}", max(D, V), a.q.dtype, a.q.device)
    blocks = heads * cdiv(T, entry.keys) if kernel is by_keys else H * cdiv(T, entry.block)
    sizes: dict[str, Any] = {"H": H, "R": H // heads, "D": D, "V": V, "DTYPE": factor_dtype(a.q.dtype)}
    sizes |= {"QUERIES": entry.block, "KEYS": entry.keys, "warps": entry.warps, "stages": entry.stages}
    q, k, v = map(_rows, a[:3])
    enqueue(kernel, B * blocks, q, k, v, *tensors, T, a.scale, *(x.stride(1) for x in (q, k, v)), **sizes)


def _rows(x: Tensor) -> Tensor:
    """x [B,T,H,D], copied if anything but its tokens is not contiguous."""
    _, T, _, D = x.shape
    return x if x.stride() == (T * x.stride(1), x.stride(1), D, 1) else x.contiguous()


def _along_time(a: Arguments) -> tuple[Tensor, Tensor | None]:
    """The log decays, and the position of each token in its document."""
    return a.log_decay.contiguous(), None if a.cu_seqlens is None else places(a.cu_seqlens, a.q.shape[1])[1]


def _compute(a: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    B, T, H, _ = a.q.shape
    o, lse, tokens = _empty(a)
    enqueue(sum_decays, B * H, *_along_time(a), tokens, T, a.window, H=H, **WALK)
    _run(by_queries, "forward", a, tokens, o, lse, *[None] * 4)
    return o, lse, tokens


def _differentiate(a: Arguments, needed: Any, do: Tensor, o: Tensor, *residuals: Tensor) -> Gradients:
    lse, tokens = residuals
    (B, T, H, _), do = a.q.shape, do.contiguous()
    dq, dk, dv, dlog_decay = (new(x) for x in a[:4])
    of_queries, rows, columns = new(tokens), new(lse), new(lse)
    _run(by_queries, "query_gradients", a, tokens, o, lse, do, of_queries, dq, rows)
    _run(by_keys, "key_gradients", a, tokens, do, of_queries, dk, dv, columns)
    enqueue(differentiate_decays, B * H, *_along_time(a), rows, columns, dlog_decay, T, H=H, **WALK)
    return {"q": dq, "k": dk, "v": dv, "log_decay": dlog_decay}


decayed_attention = register("decayed_attention", _compute, _differentiate, _empty, saves_results=True)


def forward(a: Attention) -> Tensor:
    """o [B,T,H,V]."""
    window = a.q.shape[1] if a.window_size is None else a.window_size
    o: Tensor = decayed_attention(a.q, a.k, a.v, a.log_decay, a.cu_seqlens, window, a.scale)
    return o
