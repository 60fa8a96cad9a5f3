"""The gated product and its linear map in PyTorch: the formula as written, and in at least fp32."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.autocast import without_autocast
from ..core.autograd import once, plain
from ..core.deterministic import is_deterministic
from ..core.elementwise import silu
from ..core.recurrence import at_least_fp32
from ..linear.tiles import linear

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"identity": lambda x: x, "silu": silu}


def forward(gate_up: Tensor, weight: Tensor, activation: str) -> Tensor:
    """[…,O]; see `gated_linear`."""
    return linear(multiplied(gate_up, activation), weight)


def multiplied(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) ⊙ up […,I]."""
    if activation == "silu" and gate_up.is_cpu and plain((gate_up,)) and not is_deterministic():
        y: Tensor = _Gated.apply(gate_up)
        return y
    gate, up = gate_up.chunk(2, -1)
    return ACTIVATIONS[activation](gate) * up


def product(x: Tensor, weight: Tensor, activation: str) -> Tensor:
    """The input of the second map of a gated MLP […,I], from the weight [2·I,…] of the first."""
    return multiplied(linear(x, weight), activation)


class _Gated(torch.autograd.Function):
    """SiLU(gate) ⊙ up, whose two gradients are written into one tensor instead of concatenated."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        opened = F.silu(gate)
        ctx.save_for_backward(gate_up, opened)
        return opened * up

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        gate_up, opened = ctx.saved_tensors
        dgate_up = torch.empty_like(gate_up)
        (gate, up), (dgate, dup) = gate_up.chunk(2, -1), dgate_up.chunk(2, -1)
        torch.mul(dy, opened, out=dup)
        torch.ops.aten.silu_backward.grad_input(torch.mul(dy, up, out=dgate), gate, grad_input=dgate)
        return dgate_up


def reference(gate_up: Tensor, weight: Tensor, activation: str) -> Tensor:
    """The formula in at least fp32."""
    with without_autocast(gate_up.device):
        h = _multiplied(gate_up, activation)
        return (h @ at_least_fp32(weight).mT).to(gate_up.dtype)


def product_reference(x: Tensor, weight: Tensor, activation: str) -> Tensor:
    """The formula of `product` in at least fp32."""
    return _multiplied(at_least_fp32(x) @ at_least_fp32(weight).mT, activation).to(x.dtype)


def _multiplied(gate_up: Tensor, activation: str) -> Tensor:
    gate, up = at_least_fp32(gate_up).chunk(2, -1)
    return up * (gate / (1 + torch.exp(-gate)) if activation == "silu" else gate)
