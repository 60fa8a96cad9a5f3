"""A gated MLP. On a GPU, the first product and the gate can be one launch."""

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


def two_ops(x: Tensor, gate_up: Tensor, down: Tensor, activation: Literal["identity", "silu"]) -> Tensor:
    """y […,O], from two ops; see `gated_mlp`."""
    return gated_linear(linear(x, gate_up), down, activation=activation)


MLP = Op("gated_mlp", reference=two_ops, torch=two_ops, gpu="kernels.gated_linear.gpu.mlp:forward")


def gated_mlp(x: Tensor, gate_up: Tensor, down: Tensor, *, activation: Literal["identity", "silu"] = "silu") -> Tensor:
    """`gated_linear` of a linear map: W_down (activation(W_gate x) ⊙ W_up x).

    On a GPU the first product and the gate are one launch for few rows without gradients, and on Hopper in bf16 for
    many rows and a multiple of 128 channels. For the latter, so are the gradients of the product and of the gate.

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
    if down.dim() != 2:
        raise ValueError(f"down: expected [O,I], got shape {tuple(down.shape)}")
    if gate_up.shape != (2 * down.shape[-1], x.shape[-1]):
        expected = [2 * down.shape[-1], x.shape[-1]]
        raise ValueError(f"gate_up: expected {expected}, got shape {tuple(gate_up.shape)}")
    check(activation)
    if few_rows(x, gate_up):
        return linear(PRODUCT(x, x, gate_up, activation), down)
    y: Tensor = MLP(x, x, gate_up, down, activation)
    return y
