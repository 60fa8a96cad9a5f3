"""The second half of a gated MLP: (activation(gate) ⊙ up) Wᵀ."""

from typing import Literal

from torch import Tensor

from ..core.backend import Op
from . import composition

OP = Op(
    "gated_linear",
    reference=composition.reference,
    torch=composition.forward,
    gpu="kernels.gated_linear.gpu.op:forward",
)


def gated_linear(gate_up: Tensor, weight: Tensor, *, activation: Literal["identity", "silu"] = "silu") -> Tensor:
    """(activation(gate) ⊙ up) Wᵀ (arXiv 2002.05202; 2406.16690 with the identity).

    On a GPU the elementwise product is one launch. Inside `recomputing()`, and where it is compiled, it is recomputed
    in the backward pass instead of saved.

    Args:
        gate_up: gate and up side by side […,2·I], as one projection returns them.
        weight: W [O,I], in the dtype of gate_up unless autocast is on.
        activation: Activation of the gate: silu or identity.

    Returns:
        y […,O].

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up: {gate_up.shape[-1]} channels are not two equal parts")
    if weight.dim() != 2 or weight.shape[1] != gate_up.shape[-1] // 2:
        raise ValueError(f"weight: expected [O,{gate_up.shape[-1] // 2}], got shape {tuple(weight.shape)}")
    check(activation)
    y: Tensor = OP(gate_up, gate_up, weight, activation)
    return y


def check(activation: str) -> None:
    """Check the name of an activation.

    Raises:
        ValueError: It is not one of `composition.ACTIVATIONS`.
    """
    if activation not in composition.ACTIVATIONS:
        raise ValueError(f"activation: {activation!r} is not one of {', '.join(composition.ACTIVATIONS)}")
