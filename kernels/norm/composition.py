"""RMS normalisation and LayerNorm in PyTorch, in at least fp32: as a composition of ops, and by their formula."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.autograd import once, over_rows, plain
from ..core.deterministic import is_deterministic
from ..core.elementwise import sigmoid, silu
from ..core.recurrence import at_least_fp32

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu, "sigmoid": sigmoid}  # of the gate


class Arguments(NamedTuple):
    x: Tensor  # […,D]
    gate: Tensor | None  # like x
    weight: Tensor | None  # [D]
    bias: Tensor | None  # [D] of a LayerNorm; None for a norm without a mean
    eps: float
    gate_first: bool
    activation: str  # of the gate
    dtype: torch.dtype  # of the result


def forward(*args: Any) -> Tensor:
    """The norm in the shape of x, of the fields of `Arguments`."""
    x, gate, weight, bias, eps, gate_first, activation, dtype = Arguments(*args)
    wide = torch.promote_types(x.dtype, torch.float32)
    widened, opened = x.to(wide), None if gate is None else ACTIVATIONS[activation](gate.to(wide))
    if opened is not None and gate_first:
        widened = widened * opened
    weight = None if weight is None else weight.to(wide)
    if bias is not None:
        y = F.layer_norm(widened, x.shape[-1:], weight, bias.to(wide), eps)
    elif widened.is_cpu and plain((widened, weight)):
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
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rate = ctx.saved_tensors
        y, dweight = x * rate, None
        along = dy * y
        if weight is None:
            mean = along.mean(-1, keepdim=True)
        else:
            dweight = over_rows(along)
            # a product is faster, but its rounding depends on the number of rows
            total = (along * weight).sum(-1) if ctx.deterministic else along @ weight
            mean = total.unsqueeze(-1) / len(weight)
            dy = dy * weight
        return torch.addcmul(dy, y, mean, value=-1).mul_(rate), dweight, None


def reference(*args: Any) -> Tensor:
    """The formula, of the fields of `Arguments`."""
    x, gate, weight, bias, eps, gate_first, activation, dtype = Arguments(*args)
    y, opened = at_least_fp32(x), None
    if gate is not None:
        opened = at_least_fp32(gate).sigmoid()
        opened = opened * at_least_fp32(gate) if activation == "silu" else opened
    if opened is not None and gate_first:
        y = y * opened
    if bias is not None:
        y = y - y.mean(-1, keepdim=True)
    y = y / (y.square().mean(-1, keepdim=True) + eps).sqrt()
    if weight is not None:
        y = y * at_least_fp32(weight)
    if bias is not None:
        y = y + at_least_fp32(bias)
    if opened is not None and not gate_first:
        y = y * opened
    return y.to(dtype)
