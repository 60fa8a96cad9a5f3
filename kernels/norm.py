"""Root-mean-square normalisation, alone and with an output gate."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """x / √(mean x² + eps) · weight over the last axis, computed in at least fp32.

    Args:
        x: Any shape […,D].
        weight: [D], or None for no scale.
        eps: Added inside the root.

    Returns:
        The shape and dtype of x.
    """
    kind = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(kind), x.shape[-1:], None if weight is None else weight.to(kind), eps).to(x.dtype)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, gate_first: bool = False
) -> Tensor:
    """rms_norm(x) · SiLU(gate), or rms_norm(x · SiLU(gate)) with `gate_first` (Mamba2).

    Args:
        x: Any shape […,D].
        gate: The shape of x, before the activation.
        weight: [D], or None for no scale.
        eps: Added inside the root.
        gate_first: Whether the gate enters before the norm.

    Returns:
        The shape and dtype of x.
    """
    kind = torch.promote_types(x.dtype, torch.float32)
    opened = F.silu(gate.to(kind))
    if gate_first:
        return rms_norm(x.to(kind) * opened, weight, eps).to(x.dtype)
    return (rms_norm(x.to(kind), weight, eps) * opened).to(x.dtype)
