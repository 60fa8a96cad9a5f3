"""The gated product and its linear map in PyTorch: as they are written, and in fp32."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..arguments import at_least_fp32

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"identity": lambda x: x, "silu": F.silu}


def forward(gate_up: Tensor, weight: Tensor, activation: str) -> Tensor:
    """[…,O]; see `gated_linear`."""
    gate, up = gate_up.chunk(2, -1)
    return F.linear(ACTIVATIONS[activation](gate) * up, weight)


def reference(gate_up: Tensor, weight: Tensor, activation: str) -> Tensor:
    """The same in at least fp32."""
    with torch.autocast(gate_up.device.type, enabled=False):
        gate, up = at_least_fp32(gate_up).chunk(2, -1)
        opened = gate / (1 + torch.exp(-gate)) if activation == "silu" else gate
        return ((opened * up) @ at_least_fp32(weight).mT).to(gate_up.dtype)
