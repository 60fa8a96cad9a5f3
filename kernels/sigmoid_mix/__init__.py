"""A mixture of two streams whose shares are the sigmoid of a gate per channel: the values of RWKV-7."""

import torch
from torch import Tensor

from ..core.backend import Op
from ..core.elementwise import sigmoid
from ..core.recompute import remake
from ..core.recurrence import at_least_fp32


def composed(x: Tensor, other: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
    """The formula in PyTorch."""
    share = sigmoid(at_least_fp32(gate) + at_least_fp32(bias))
    return (x + (at_least_fp32(other) - x) * share).to(x.dtype)


def reference(x: Tensor, other: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
    """The formula, with σ(x) = (1 + tanh(x/2)) / 2."""
    share = (1 + torch.tanh((at_least_fp32(gate) + at_least_fp32(bias)) / 2)) / 2
    return ((1 - share) * at_least_fp32(x) + share * at_least_fp32(other)).to(x.dtype)


OP = Op("sigmoid_mix", reference=reference, torch=composed, gpu="kernels.sigmoid_mix.gpu.op:forward")


def sigmoid_mix(x: Tensor, other: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
    """x + σ(gate + bias) ⊙ (other − x), computed in at least fp32.

    Inside `recomputing()`, the backward pass recomputes the result.

    Args:
        x: Stream of any shape […,C].
        other: Stream in the shape of x.
        gate: Gate before its activation, in the shape of x.
        bias: Bias of the gate [C].

    Returns:
        y in the shape and dtype of x.

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """
    if not x.is_floating_point():
        raise ValueError(f"x: expected a floating dtype, got {x.dtype}")
    for name, tensor in {"other": other, "gate": gate}.items():
        if tensor.shape != x.shape:
            raise ValueError(f"{name}: expected the shape of x, {tuple(x.shape)}, got {tuple(tensor.shape)}")
    if bias.shape != x.shape[-1:]:
        raise ValueError(f"bias: expected [{x.shape[-1]}], got shape {tuple(bias.shape)}")
    args = (x, other, gate, bias)
    run = OP.choose(x, *args)
    return remake(run(*args), run, *args)
