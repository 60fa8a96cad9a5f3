"""A gated MLP: two launches for few rows on a GPU, the first of which also applies the gate."""

from typing import Literal

from torch import Tensor

from ..core.backend import Op
from ..linear import few_rows, linear
from . import check, composition, gated_linear

PRODUCT = Op(
    "gated_product",
    reference=composition.product_reference,
    torch=composition.product,
    gpu="kernels.gated_linear.gpu.op:product",
)


def gated_mlp(x: Tensor, gate_up: Tensor, down: Tensor, *, activation: Literal["identity", "silu"] = "silu") -> Tensor:
    """`gated_linear` of a linear map: W_down (activation(W_gate x) ⊙ W_up x).

    Args:
        x: Inputs […,D].
        gate_up: W_gate and W_up one below the other [2·I,D].
        down: W_down [O,I].
        activation: Activation of the gate: silu or identity.

    Returns:
        y […,O].

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """
    if gate_up.shape != (2 * down.shape[-1], x.shape[-1]):
        expected = [2 * down.shape[-1], x.shape[-1]]
        raise ValueError(f"gate_up: expected {expected}, got shape {tuple(gate_up.shape)}")
    if not few_rows(x, gate_up):
        return gated_linear(linear(x, gate_up), down, activation=activation)
    check(activation)
    return linear(PRODUCT(x, x, gate_up, activation), down)
