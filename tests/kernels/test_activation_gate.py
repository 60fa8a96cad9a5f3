"""The activation of a gate, alone or times a stream: by the formula, and in Triton."""

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from kernels.activation_gate import activation_gate

from .op_contract import DEVICE, OpContract, Tensors


class TestSigmoid(OpContract):
    op = "activation_gate"
    activation: Literal["sigmoid", "silu", "relu2"] = "sigmoid"
    sizes = ((1, 1), (2, 3, 7), (3, 2, 1030))
    some_sizes = (2, 4, 33)
    device_sizes = ((4, 4097, 1024),)
    low = ("gate", "x", "y")
    tolerances = (1.3e-6, 1e-5)
    low_tolerances = (1e-2, 1e-6)
    device_tolerance = 1e-5
    fitting = (2, 3)
    misfits = (
        ({"x": torch.zeros(2, 4)}, r"x: expected the shape of gate, \(2, 3\), got \(2, 4\)"),
        ({"activation": "tanh"}, "activation: 'tanh' is not one of sigmoid, silu, relu2"),
    )

    def inputs(self, *sizes: int) -> Tensors:
        """A gate that is columns of a projection, and a stream."""
        wide = 4 * torch.randn(*sizes[:-1], sizes[-1] + 3, device=DEVICE)  # bf16 would lose the slope of shares near 1
        return {"gate": wide[..., 1:-2], "x": torch.randn(sizes, device=DEVICE)}

    def call(self, **tensors: Any) -> Tensor:
        return activation_gate(**{"activation": self.activation, "largest": 2.0, **tensors})

    def formula(self, gate, x=1) -> Tensor:
        share = 1 / (1 + torch.exp(-gate))
        powers = {"sigmoid": share, "silu": gate * share, "relu2": torch.where(gate > 0, gate * gate, 0)}
        return 2 * x * powers[self.activation]

    def registered(self, tensors: Tensors) -> Iterable[tuple[Any, ...]]:
        yield tensors["gate"], tensors.get("x"), self.activation, 2.0, False


class TestSigmoidAlone(TestSigmoid):
    low = ("gate", "y")

    def inputs(self, *sizes: int) -> Tensors:
        return {"gate": super().inputs(*sizes)["gate"]}


class TestSilu(TestSigmoid):
    activation = "silu"


class TestSquaredRelu(TestSigmoidAlone):
    activation = "relu2"


def test_squared_relu_stays_in_bf16_under_autocast():
    """PyTorch's autocast squares in fp32: three casts of the widest tensor of a layer each way."""
    x = torch.randn(4, 9, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = activation_gate(x, activation="relu2")
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, x.detach().float().relu().square().bfloat16())
