"""Choice among the implementations of attention within the backend `torch`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.backend import has_triton, loaded, on_gpu
from ..core.deterministic import is_deterministic
from . import aligned, chunk, flash, flex
from .arguments import Attention


class Candidate(NamedTuple):
    """One implementation."""

    forward: Callable[[Attention], Tensor]
    serves: Callable[[Attention], bool]  # whether it can compute a call, on a GPU


def _fits_triton(a: Attention) -> bool:
    """Return whether scores decay, all tokens are new, and the head sizes are powers of two from 16 to 256."""
    fitting = all(16 <= size <= 256 and size & (size - 1) == 0 for size in (a.q.shape[3], a.v.shape[3]))
    return fitting and a.log_decay is not None and a.first_key is None and a.q.shape[1] == a.k.shape[1] and has_triton()


def _in_triton(a: Attention) -> Tensor:
    o: Tensor = loaded("kernels.window_attention.gpu.op:forward")(a)  # not every platform has Triton
    return o


CANDIDATES = {
    "step": Candidate(chunk.step, chunk.one_query),
    "flash": Candidate(flash.forward, flash.serves),
    "flex": Candidate(flex.forward, flex.serves),
    "triton": Candidate(_in_triton, _fits_triton),
    "chunk": Candidate(chunk.forward, lambda a: True),
    "aligned": Candidate(aligned.forward, lambda a: True),
}


# On a GPU in half precision, by whether documents are packed and whether the window is shorter than the keys: from the
# fastest on, the first candidate that serves the call runs. Unless PyTorch is set to use deterministic algorithms, the
# gradient of q is not bitwise repeatable with FlashAttention, nor with PyTorch's kernel for fp32, which "chunk" uses.
RULES = {
    (False, False): ("chunk",),
    (False, True): ("flex", "flash", "chunk"),
    (True, False): ("flash", "flex", "chunk"),
    (True, True): ("flex", "flash", "chunk"),
}
DECAYED = ("triton", "chunk")  # with log decays, which "chunk" computes in fp32


def chosen(a: Attention) -> str:
    """The name of the candidate that computes a call."""
    if is_deterministic():
        return "aligned"
    if chunk.one_query(a):
        return "step"
    T, S = a.q.shape[1], a.k.shape[1]
    if on_gpu(a.q) and a.q.dtype in (torch.bfloat16, torch.float16) and T == S and a.first_key is None:
        names = DECAYED if a.log_decay is not None else RULES[a.documents is not None, a.window_size is not None]
        return next(name for name in names if CANDIDATES[name].serves(a))
    return "chunk"


def forward(a: Attention) -> Tensor:
    """o [B,T,H,V]. Where kernels are only listed, those of PyTorch are not: o saves what FlashAttention saves."""
    name = chosen(a)
    if a.v.is_meta and on_gpu(a.v) and name != "triton":
        return _Listed.apply(a.q, a.k, a.v, a.log_decay)
    return CANDIDATES[name].forward(a)


class _Listed(torch.autograd.Function):
    """Attention without results, on the meta device: saved are the inputs, the output and a number for each query."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None) -> Tensor:
        o = v.new_empty(*q.shape[:3], v.shape[3])
        ctx.save_for_backward(q, k, v, log_decay, o, q.new_empty(q.shape[:3], dtype=torch.float32))
        return o

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(None if x is None else torch.empty_like(x) for x in ctx.saved_tensors[:4])
