"""The sigmoid of a gate, alone or times a stream: by the formula, and in Triton."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
from kernels.sigmoid_gate import sigmoid_gate

from .op_contract import DEVICE, OpContract, Tensors


class TestSigmoidGate(OpContract):
    op = "sigmoid_gate"
    sizes = (
        (1, 1),
        (2, 3, 7),
        (3, 2, 1030),
    )
    some_sizes = (2, 4, 33)
    device_sizes = ((4, 4097, 1024),)
    low = ("gate", "x", "y")
    tolerances = (1.3e-6, 1e-5)
    low_tolerances = (1e-2, 1e-6)
    device_tolerance = 1e-5

    def inputs(self, *sizes: int) -> Tensors:
        """A gate that is columns of a projection, and a stream."""
        wide = 4 * torch.randn(*sizes[:-1], sizes[-1] + 3, device=DEVICE)  # bf16 would lose the slope of shares near 1
        return {"gate": wide[..., 1:-2], "x": torch.randn(sizes, device=DEVICE)}

    def call(self, **tensors: Tensor) -> Tensor:
        return sigmoid_gate(**tensors, largest=2.0)

    def registered(self, tensors: Tensors) -> Iterable[tuple[Any, ...]]:
        yield tensors["gate"], tensors.get("x"), 2.0, False


class TestSigmoidAlone(TestSigmoidGate):
    low = ("gate", "y")

    def inputs(self, *sizes: int) -> Tensors:
        return {"gate": super().inputs(*sizes)["gate"]}


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_by_the_formula(backend: str):
    gate, x = torch.randn(2, 3, 5, 7, dtype=torch.float64)
    with kernels.backend(backend):
        torch.testing.assert_close(sigmoid_gate(gate, x), x / (1 + torch.exp(-gate)))
        torch.testing.assert_close(sigmoid_gate(gate, largest=2), 2 / (1 + torch.exp(-gate)))


def test_a_factor_of_another_shape():
    with pytest.raises(ValueError, match=r"^x: expected the shape of gate, \(2, 3\), got \(2, 4\)"):
        sigmoid_gate(torch.zeros(2, 3), torch.zeros(2, 4))
