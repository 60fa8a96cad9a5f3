"""A mixture of two streams by the sigmoid of a gate: by the formula, and in Triton."""

import torch
from torch import Tensor

from kernels import sigmoid_mix

from .op_contract import DEVICE, OpContract, Tensors


class TestSigmoidMix(OpContract):
    op = "sigmoid_mix"
    sizes = ((1, 1), (2, 3, 7), (3, 70, 300))
    some_sizes = (2, 70, 40)
    device_sizes = ((2, 4097, 1024),)
    rounded_once = ("triton",)
    low = ("x", "other", "gate", "y")
    tolerances = (1e-4, 1e-5)
    fitting = (2, 3)
    misfits = (
        ({"gate": torch.zeros(2, 2)}, r"gate: expected the shape of x, \(2, 3\), got \(2, 2\)"),
        ({"x": torch.zeros(2, 3).long()}, "x: expected a floating dtype, got torch.int64"),
        ({"bias": torch.zeros(2)}, r"bias: expected \[3\], got shape \(2,\)"),
    )

    def inputs(self, *shape: int) -> Tensors:
        """Two streams, a gate that is columns of a projection, some of it extreme, and its bias."""
        x, other = torch.randn(2, *shape)
        gate = 3 * torch.randn(*shape[:-1], shape[-1] + 3)[..., 2:-1]
        gate[..., 0] = 100.0  # an exponential would overflow
        tensors = {"x": x, "other": other, "gate": gate, "bias": torch.randn(shape[-1])}
        return {name: t.to(DEVICE) for name, t in tensors.items()}

    def call(self, **tensors: Tensor) -> Tensor:
        return sigmoid_mix(**tensors)

    def formula(self, x, other, gate, bias) -> Tensor:
        share = 1 / (1 + torch.exp(-gate - bias))
        return x * (1 - share) + other * share
