"""The second half of a gated MLP: (activation(gate) ⊙ up) Wᵀ, without keeping the product for the backward pass."""

from typing import Literal

from torch import Tensor

from ..backend import choose
from . import composition


def triton(gate: Tensor, up: Tensor, weight: Tensor, activation: str) -> Tensor:
    """The Triton implementation, imported when it is first needed: not every platform has Triton."""
    from . import triton_op

    return triton_op.forward(gate, up, weight, activation)


IMPLEMENTATIONS = {"triton": triton, "torch": composition.forward, "reference": composition.reference}


def gated_linear(
    gate: Tensor, up: Tensor, weight: Tensor, *, activation: Literal["identity", "silu"] = "silu"
) -> Tensor:
    """(activation(gate) ⊙ up) Wᵀ (arXiv 2002.05202; 2406.16690 with the identity).

    On a GPU the elementwise product is one launch, and is computed again in the backward pass instead of kept: it is
    as large as gate and up, which are kept anyway.

    Args:
        gate: […,I].
        up: The shape and dtype of gate.
        weight: [O,I], in the dtype of gate unless autocast is on.
        activation: What the gate passes through: silu or identity.

    Returns:
        […,O].

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """
    if up.shape != gate.shape or up.dtype != gate.dtype:
        raise ValueError(f"up: expected {gate.dtype} {tuple(gate.shape)}, got {up.dtype} {tuple(up.shape)}")
    if weight.dim() != 2 or weight.shape[1] != gate.shape[-1]:
        raise ValueError(f"weight: expected [O,{gate.shape[-1]}], got shape {tuple(weight.shape)}")
    if activation not in composition.ACTIVATIONS:
        raise ValueError(f"activation: {activation!r} is not one of {', '.join(composition.ACTIVATIONS)}")
    return choose("gated_linear", IMPLEMENTATIONS, gate)(gate, up, weight, activation)
