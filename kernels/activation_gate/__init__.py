"""An activation of each channel, alone or times a stream: output gates, strengths, and squared ReLU."""

from typing import Literal

import torch
from torch import Tensor

from ..core.autocast import without_autocast
from ..core.backend import Op
from ..core.elementwise import sigmoid, silu
from ..core.recurrence import at_least_fp32

ACTIVATIONS = {"sigmoid": sigmoid, "silu": silu, "relu2": lambda x: x.relu().square()}


def composed(gate: Tensor, x: Tensor | None, activation: str, largest: float) -> Tensor:
    """The formula in PyTorch."""
    with without_autocast(gate.device):  # which squares in fp32
        factor = ACTIVATIONS[activation](gate if x is None and activation == "relu2" else at_least_fp32(gate))
        factor = factor if largest == 1 else largest * factor
        return factor.to(gate.dtype) if x is None else (factor * x).to(x.dtype)


def reference(gate: Tensor, x: Tensor | None, activation: str, largest: float) -> Tensor:
    """The formula, with σ(x) = (1 + tanh(x/2)) / 2."""
    wide = at_least_fp32(gate)
    factor = wide.clamp(min=0) ** 2 if activation == "relu2" else (1 + torch.tanh(wide / 2)) / 2
    factor = largest * (wide * factor if activation == "silu" else factor)
    return factor.to(gate.dtype) if x is None else (factor * at_least_fp32(x)).to(x.dtype)


OP = Op("activation_gate", reference=reference, torch=composed, gpu="kernels.activation_gate.gpu.op:forward")


def activation_gate(
    gate: Tensor,
    x: Tensor | None = None,
    *,
    activation: Literal["sigmoid", "silu", "relu2"] = "sigmoid",
    largest: float = 1.0,
) -> Tensor:
    """largest · activation(gate) · x, computed in at least fp32, in one launch.

    Args:
        gate: Gate before its activation, of any shape […,C].
        x: Factor in the shape of the gate; None for 1.
        activation: σ(gate), gate · σ(gate), or max(gate, 0)².
        largest: Factor of the result: what largest · σ(gate) stays below.

    Returns:
        y in the shape of the gate, and in the dtype of x, or of the gate without x.

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """
    if x is not None and x.shape != gate.shape:
        raise ValueError(f"x: expected the shape of gate, {tuple(gate.shape)}, got {tuple(x.shape)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: {activation!r} is not one of {', '.join(ACTIVATIONS)}")
    y: Tensor = OP(gate, gate, x, activation, largest)
    return y
