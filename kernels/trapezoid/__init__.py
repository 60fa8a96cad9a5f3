"""Gates of Mamba-3: decay, step size, and the share of a step that the current token gets."""

import torch
from torch import Tensor

from ..core.backend import Op
from ..core.elementwise import sigmoid, softplus
from ..core.recurrence import at_least_fp32

SLOWEST = 1e-4  # smallest rate A


def rate(r: Tensor) -> Tensor:
    """A = 1 + r for r ≥ 0 and 1 / (1 − r) below, at least `SLOWEST`."""
    return torch.where(r >= 0, 1 + r, 1 / (1 - r.clamp(max=0))).clamp(min=SLOWEST)


def composed(a: Tensor, r: Tensor, w: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The formulas in PyTorch."""
    a, r, w = map(at_least_fp32, (a, r, w))
    dt = softplus(a + dt_bias)
    return -rate(r) * dt, dt, sigmoid(w)


def reference(a: Tensor, r: Tensor, w: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The formulas, with softplus by its definition and σ(x) = (1 + tanh(x/2)) / 2."""
    a, r, w = map(at_least_fp32, (a, r, w))
    dt = torch.logaddexp(a + dt_bias, torch.zeros_like(a))
    return -rate(r) * dt, dt, (1 + torch.tanh(w / 2)) / 2


OP = Op("trapezoid", reference=reference, torch=composed, gpu="kernels.trapezoid.gpu.op:forward")


def trapezoid(a: Tensor, r: Tensor, w: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log_decay = −A dt, dt = softplus(a + dt_bias) and σ(w) (Mamba-3, arXiv 2603.15569), in one launch.

    Args:
        a: Inputs of the step sizes […,M].
        r: Inputs of the rates […,M]: A = 1 + r for r ≥ 0 and 1 / (1 − r) below, at least 1e-4.
        w: Inputs of the shares […,M].
        dt_bias: Bias of a [M].

    Returns:
        log_decay, dt and σ(w), each […,M] in at least fp32.

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """
    for name, x, shape in (("r", r, a.shape), ("w", w, a.shape), ("dt_bias", dt_bias, a.shape[-1:])):
        if x.shape != shape:
            raise ValueError(f"{name}: expected {list(shape)}, got shape {tuple(x.shape)}")
    log_decay, dt, share = OP(a, a, r, w, dt_bias)
    return log_decay, dt, share
