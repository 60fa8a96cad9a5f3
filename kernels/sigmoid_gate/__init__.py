"""The sigmoid of a gate per channel, alone or times a stream: the strengths of Gated DeltaNet-2."""

import torch
from torch import Tensor

from ..core.backend import Op
from ..core.elementwise import sigmoid
from ..core.recurrence import at_least_fp32


def composed(gate: Tensor, x: Tensor | None, largest: float) -> Tensor:
    """The formula in PyTorch."""
    factor = largest * sigmoid(at_least_fp32(gate))
    return factor.to(gate.dtype) if x is None else (factor * x).to(x.dtype)


def reference(gate: Tensor, x: Tensor | None, largest: float) -> Tensor:
    """The formula, with σ(x) = (1 + tanh(x/2)) / 2."""
    factor = largest * (1 + torch.tanh(at_least_fp32(gate) / 2)) / 2
    return factor.to(gate.dtype) if x is None else (factor * at_least_fp32(x)).to(x.dtype)


OP = Op("sigmoid_gate", reference=reference, torch=composed, gpu="kernels.sigmoid_gate.gpu.op:forward")


def sigmoid_gate(gate: Tensor, x: Tensor | None = None, *, largest: float = 1.0) -> Tensor:
    """largest · σ(gate) · x, computed in at least fp32.

    Args:
        gate: Gate before its activation, of any shape […,C].
        x: Factor in the shape of the gate; None for 1.
        largest: What largest · σ(gate) stays below.

    Returns:
        y in the shape of the gate, and in the dtype of x, or of the gate without x.

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """
    if x is not None and x.shape != gate.shape:
        raise ValueError(f"x: expected the shape of gate, {tuple(gate.shape)}, got {tuple(x.shape)}")
    y: Tensor = OP(gate, gate, x, largest)
    return y
