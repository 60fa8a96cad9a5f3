"""PyTorch's FlashAttention-2, which supports windows and packed documents, and computes nothing outside them."""

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .arguments import Attention


def serves(a: Attention) -> bool:
    """Return whether the kernel supports the dtype and the head size, all tokens are new, and nothing decays."""
    size = a.q.shape[3]
    supported = a.q.dtype in (torch.bfloat16, torch.float16) and size <= 256 and size % 8 == 0
    supported &= a.v.shape[3] == size and a.log_decay is None
    return supported and a.first_key is None and a.q.shape[1] == a.k.shape[1] and has("window_size")


def forward(a: Attention) -> Tensor:
    """o [B,T,H,D]. Without packed documents, every row is a document."""
    B, T = a.q.shape[:2]
    if a.documents is None or a.cu_seqlens is None:
        bounds, longest = torch.arange(0, (B + 1) * T, T, dtype=torch.int32, device=a.q.device), T
    else:
        bounds, longest = a.cu_seqlens.to(torch.int32), a.documents.longest_bound()
    options: dict[str, Any] = {"scale": a.scale, "window_size": (-1 if a.window_size is None else a.window_size - 1, 0)}
    if a.q.shape[2] != a.k.shape[2] and has("enable_gqa"):  # versions without this option always allow it
        options["enable_gqa"] = True
    q, k, v = (x.flatten(0, 1) for x in (a.q, a.k, a.v))
    return attention()(q, k, v, bounds, bounds, longest, longest, **options).unflatten(0, (B, T))


def attention() -> Any:
    """PyTorch's function, imported on first use."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


def has(option: str) -> bool:
    """Return whether PyTorch's function has an option, which depends on the version."""
    return option in _options()


@cache
def _options() -> frozenset[str]:
    return frozenset(inspect.signature(attention()).parameters)


has._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as in `kernels.core.backend`: nothing to trace
