"""Root-mean-square normalisation in PyTorch, in at least fp32: as a composition of ops, and by its formula."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..core.autograd import plain
from ..core.deterministic import is_deterministic
from ..core.elementwise import silu
from ..core.recurrence import at_least_fp32


def forward(
    x: Tensor, gate: Tensor | None, weight: Tensor | None, eps: float, gate_first: bool, dtype: torch.dtype
) -> Tensor:
    """The norm in the shape of x; see `gated_rms_norm`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    widened, opened = x.to(wide), None if gate is None else silu(gate.to(wide))
    if opened is not None and gate_first:
        widened = widened * opened
    weight = None if weight is None else weight.to(wide)
    if widened.is_cpu and plain((widened, weight)):
        y = _Norm.apply(widened, weight, eps)
    else:
        y = F.rms_norm(widened, x.shape[-1:], weight, eps)
    return (y if opened is None or gate_first else y * opened).to(dtype)


class _Norm(torch.autograd.Function):
    """x / √(mean x² + eps) · weight: PyTorch's version passes over memory twice as often on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        rate = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rate)
        ctx.deterministic = is_deterministic()
        y = x * rate
        return y if weight is None else y.mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rate = ctx.saved_tensors
        y, dweight = x * rate, None
        along = dy * y
        if weight is None:
            mean = along.mean(-1, keepdim=True)
        else:
            dweight = along.flatten(0, -2).sum(0)
            # a product is faster, but its rounding depends on the number of rows
            total = (along * weight).sum(-1) if ctx.deterministic else along @ weight
            mean = total.unsqueeze(-1) / len(weight)
            dy = dy * weight
        return torch.addcmul(dy, y, mean, value=-1).mul_(rate), dweight, None


def reference(
    x: Tensor, gate: Tensor | None, weight: Tensor | None, eps: float, gate_first: bool, dtype: torch.dtype
) -> Tensor:
    """The formula."""
    y, opened = at_least_fp32(x), None if gate is None else at_least_fp32(gate) * at_least_fp32(gate).sigmoid()
    if opened is not None and gate_first:
        y = y * opened
    y = y / (y.square().mean(-1, keepdim=True) + eps).sqrt()
    if weight is not None:
        y = y * at_least_fp32(weight)
    if opened is not None and not gate_first:
        y = y * opened
    return y.to(dtype)
