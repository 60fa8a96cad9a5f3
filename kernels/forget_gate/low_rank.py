"""Log decays from low-rank gates: log σ(W x + b)."""

import torch
from torch import Tensor

from ..core.autocast import autocast_dtype
from ..core.backend import Op
from ..core.recurrence import at_least_fp32
from ..head_linear import head_linear
from . import composition, forget_gate


def composed(x: Tensor, weight: Tensor, bias: Tensor | None, scale: float, negated: bool) -> Tensor:
    """The decays of a separate matrix product."""
    if negated:
        x, bias = -x, None if bias is None else -bias
    raw = head_linear(x.unflatten(-1, (1, -1)), weight.mT[None])  # as of a single head
    # by views, since the gradient of an index is a copy into zeros
    return forget_gate(raw.flatten(2), bias, scale=scale).to(dtype_of(x))


def _by_formula(x: Tensor, weight: Tensor, bias: Tensor | None, scale: float, negated: bool) -> Tensor:
    raw = at_least_fp32(x) @ at_least_fp32(weight).mT
    raw = raw if bias is None else raw + bias
    return composition.reference(-raw if negated else raw, None, None, scale).to(dtype_of(x))


def dtype_of(x: Tensor) -> torch.dtype:
    """The dtype of the decays. Gradients of decays in fp16 would be too small for it."""
    return x.dtype if x.dtype == torch.bfloat16 else torch.promote_types(x.dtype, torch.float32)


OP = Op(
    "low_rank_forget_gate",
    reference=_by_formula,
    torch=composed,
    gpu="kernels.forget_gate.gpu.low_rank:forward",
)


def low_rank_forget_gate(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, scale: float = 1.0, negated: bool = False
) -> Tensor:
    """log_decay = scale · log σ(W x + bias) (GLA, arXiv 2312.06635, section 4.4).

    It is computed in at least fp32, and rounded to bf16 if x is in bf16: an error of at most 0.2 % of each logarithm,
    and half of the bytes of what is the largest tensor of an expanded layer.

    Args:
        x: A few numbers per token [B,T,R].
        weight: W [C,R].
        bias: Added to W x [C]; None for none.
        scale: Factor on the result.
        negated: Whether to return scale · log σ(−(W x + bias)) = −scale · softplus(W x + bias) (Mamba).

    Returns:
        log_decay [B,T,C], in bf16 if x is (autocast counts), else in at least fp32.

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """
    if x.dim() != 3:
        raise ValueError(f"x: expected [B,T,R], got shape {tuple(x.shape)}")
    if weight.dim() != 2 or weight.shape[1] != x.shape[2]:
        raise ValueError(f"weight: expected [C,{x.shape[2]}], got shape {tuple(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias: expected [{weight.shape[0]}], got shape {tuple(bias.shape)}")
    if (dtype := autocast_dtype(x.device)) is not None:
        x = x.to(dtype)
    log_decay: Tensor = OP(x, x, weight, bias, scale, negated)
    return log_decay
