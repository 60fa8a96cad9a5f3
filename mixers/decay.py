"""Data-dependent decay as Mamba2 and Gated DeltaNet make it."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels import at_least_fp32


class Discretisation(nn.Module):
    """dt = softplus(a + dt_bias) and log_decay = −exp(A_log) · dt, in at least fp32.

    A starts uniform in [low, high]; dt starts log-uniform in [1e-3, 0.1] (Mamba2, arXiv 2405.21060).

    Args:
        size: Number of recurrences.
        low: Smallest initial A.
        high: Largest initial A.
    """

    no_weight_decay = ("A_log", "dt_bias")

    def __init__(self, size: int, low: float, high: float):
        super().__init__()
        self.low, self.high = low, high
        self.A_log, self.dt_bias = nn.Parameter(torch.empty(size)), nn.Parameter(torch.empty(size))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        # log(0) would freeze a head for good
        self.A_log.uniform_(self.low, self.high).clamp_(min=1e-4).log_()
        dt = self.dt_bias.uniform_(math.log(1e-3), math.log(0.1)).exp_().clamp_(min=1e-4)
        self.dt_bias.add_(torch.log(-torch.expm1(-dt)))  # the inverse of softplus

    def forward(self, a: Tensor) -> tuple[Tensor, Tensor]:
        """a [...,size] → log_decay and dt, the same shape."""
        dt = F.softplus(at_least_fp32(a) + at_least_fp32(self.dt_bias))
        return -at_least_fp32(self.A_log).exp() * dt, dt
