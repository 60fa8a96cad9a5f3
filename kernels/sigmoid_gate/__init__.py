"""A stream times the sigmoid of a gate per channel: the strengths of erasing and writing of Gated DeltaNet-2."""

import torch
from torch import Tensor

from ..core.backend import Op
from ..core.elementwise import sigmoid
from ..core.recurrence import at_least_fp32


def composed(x: Tensor, gate: Tensor, largest: float) -> Tensor:
    """The formula in PyTorch."""
    return (largest * sigmoid(at_least_fp32(gate)) * x).to(x.dtype)


def reference(x: Tensor, gate: Tensor, largest: float) -> Tensor:
    """The formula, with σ(x) = (1 + tanh(x/2)) / 2."""
    return (largest * (1 + torch.tanh(at_least_fp32(gate) / 2)) / 2 * at_least_fp32(x)).to(x.dtype)


OP = Op("sigmoid_gate", reference=reference, torch=composed, gpu="kernels.sigmoid_gate.gpu.op:forward")


def sigmoid_gate(x: Tensor, gate: Tensor, *, largest: float = 1.0) -> Tensor:
    """largest · σ(gate) · x, computed in at least fp32.

    Args:
        x: Input of any shape […,C].
        gate: Gate before its activation, in the shape of x.
        largest: What the factor stays below.

    Returns:
        y in the shape and dtype of x.

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """
    if gate.shape != x.shape:
        raise ValueError(f"gate: expected the shape of x, {tuple(x.shape)}, got {tuple(gate.shape)}")
    y: Tensor = OP(x, x, gate, largest)
    return y
