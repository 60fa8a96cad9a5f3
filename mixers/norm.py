"""Root-mean-square normalisation as a module."""

import torch
from torch import Tensor, nn

import kernels


class RMSNorm(nn.Module):
    """x / √(mean x² + eps) · weight over the last axis.

    Args:
        size: Size of the last axis.
        eps: Added inside the root.
    """

    def __init__(self, size: int, eps: float = 1e-6):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return kernels.rms_norm(x, self.weight, self.eps)


class GatedRMSNorm(RMSNorm):
    """RMSNorm(x) · SiLU(gate), or, with `gate_first`, RMSNorm(x · SiLU(gate)).

    Args:
        size: Size of the last axis.
        eps: Added inside the root.
        gate_first: Whether the gate enters before the norm (Mamba2).
        groups: The last axis is normalised in this many parts.
    """

    def __init__(self, size: int, eps: float = 1e-5, *, gate_first: bool = False, groups: int = 1):
        super().__init__(size, eps)
        self.gate_first, self.groups = gate_first, groups

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        if self.groups == 1:
            return kernels.gated_rms_norm(x, gate, self.weight, self.eps, gate_first=self.gate_first)
        cut = (self.groups, -1)
        y = kernels.gated_rms_norm(
            x.unflatten(-1, cut), gate.unflatten(-1, cut), None, self.eps, gate_first=self.gate_first
        )
        return (y.flatten(-2) * self.weight).to(x.dtype)
