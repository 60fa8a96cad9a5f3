"""Initial values of Mamba2 and Mamba-3 other than their defaults, for `mamba2_start.yaml` and `mamba3_parity.yaml`."""

import math

import torch

from mixers.decay import Mamba2Discretisation, Trapezoid


class UnscaledSteps(Mamba2Discretisation):
    """Decays as Mamba2's layer in flash-linear-attention started them until version 0.4.1: A = 1, 2, …, dt_bias = 1.

    So dt starts at softplus(1) = 1.31, and a head keeps at most 27 % of its state in each step. That version's model
    draws dt_bias as published, unless its parameters are sharded; then neither A nor dt_bias is initialised. Version
    0.4.2 draws A in [0, 16] and dt in [0.001, 0.1] in both.
    """

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.A_log.is_meta:
            return
        self.A_log.copy_(torch.arange(1, self.A_log.numel() + 1).log())
        self.dt_bias.fill_(1.0)


class LargeSteps(Trapezoid):
    """Mamba-3's decay with dt log-uniform in [0.1, 1] at the start, so that a rotation can reach up to 0.1π to π.

    Parity requires a rotation by π. With the published dt, 0.001 to 0.1, no rotation exceeds 0.1π at the start.
    """

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if not self.dt_bias.is_meta:
            dt = self.dt_bias.uniform_(math.log(0.1), 0.0).exp_()
            dt.copy_(dt.expm1().log())  # the inverse of softplus
