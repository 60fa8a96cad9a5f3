"""The gated product and its linear map in PyTorch: as they are written, and in fp32."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..arguments import at_least_fp32

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"identity": lambda x: x, "silu": F.silu}


def forward(gate: Tensor, up: Tensor, weight: Tensor, activation: str) -> Tensor:
    """[…,O]; see `gated_linear`."""
    return F.linear(ACTIVATIONS[activation](gate) * up, weight)


def reference(gate: Tensor, up: Tensor, weight: Tensor, activation: str) -> Tensor:
    """The same in at least fp32."""
    with torch.autocast(gate.device.type, enabled=False):
        g, u, w = at_least_fp32(gate), at_least_fp32(up), at_least_fp32(weight)
        gated = g / (1 + torch.exp(-g)) * u if activation == "silu" else g * u
        return (gated @ w.mT).to(gate.dtype)
