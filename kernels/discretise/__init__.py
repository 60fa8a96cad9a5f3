"""The discretisation of a decay: dt = softplus(a + dt_bias) and log_decay = −exp(A_log) · dt."""

import torch
from torch import Tensor

from ..core.backend import Op
from ..core.elementwise import softplus
from ..core.recurrence import at_least_fp32


def composed(a: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """The formula in PyTorch."""
    dt = softplus(at_least_fp32(a) + at_least_fp32(dt_bias))
    return -at_least_fp32(A_log).exp() * dt, dt


def reference(a: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """The formula, with softplus by its definition."""
    x = at_least_fp32(a) + at_least_fp32(dt_bias)
    dt = torch.log1p(torch.exp(-x.abs())) + x.clamp(min=0)
    return -torch.exp(at_least_fp32(A_log)) * dt, dt


OP = Op("discretise", reference=reference, torch=composed, gpu="kernels.delta_gates.gpu.op:discretise")


def discretise(a: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """log_decay = −exp(A_log) · dt and dt = softplus(a + dt_bias), in at least fp32 (Mamba2, arXiv 2405.21060).

    Args:
        a: Inputs […,M], one for each of M recurrences.
        A_log: Log of the decay rates [M].
        dt_bias: Bias of the inputs [M].

    Returns:
        log_decay and dt, both in the shape of a and at least fp32.

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        if x.shape != a.shape[-1:]:
            raise ValueError(f"{name}: expected [{a.shape[-1]}], got shape {tuple(x.shape)}")
    log_decay, dt = OP(a, a, A_log, dt_bias)
    return log_decay, dt
