"""A mixture of two streams by the sigmoid of a gate: by the formula, and in Triton."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
from kernels import sigmoid_mix

from .op_contract import DEVICE, OpContract, Tensors


def inputs(*shape: int) -> Tensors:
    """Two streams, a gate that is columns of a projection, some of it extreme, and its bias."""
    x, other = torch.randn(2, *shape)
    gate = 3 * torch.randn(*shape[:-1], shape[-1] + 3)[..., 2:-1]
    gate[..., 0] = 100.0  # an exponential would overflow
    tensors = {"x": x, "other": other, "gate": gate, "bias": torch.randn(shape[-1])}
    return {name: t.to(DEVICE) for name, t in tensors.items()}


class TestSigmoidMix(OpContract):
    op = "sigmoid_mix"
    sizes = ((1, 1), (2, 3, 7), (3, 70, 300))
    some_sizes = (2, 70, 40)
    device_sizes = ((2, 4097, 1024),)
    rounded_once = ("triton",)
    low = ("x", "other", "gate", "y")
    tolerances = (1e-4, 1e-5)

    def inputs(self, *sizes: int) -> Tensors:
        return inputs(*sizes)

    def call(self, **tensors: Tensor) -> Tensor:
        return sigmoid_mix(**tensors)

    def registered(self, tensors: Tensors) -> Iterable[tuple[Any, ...]]:
        yield *tensors.values(), False


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_by_the_formula(backend: str):
    x, other, gate, bias = (t.double() for t in inputs(2, 5, 7).values())
    share = 1 / (1 + torch.exp(-gate - bias))
    with kernels.backend(backend):
        torch.testing.assert_close(sigmoid_mix(x, other, gate, bias), x * (1 - share) + other * share)


def test_arguments_that_do_not_fit():
    x, other, gate, bias = inputs(2, 3).values()
    with pytest.raises(ValueError, match=r"^gate: expected the shape of x, \(2, 3\), got \(2, 2\)"):
        sigmoid_mix(x, other, gate[:, :2], bias)
    with pytest.raises(ValueError, match=r"^x: expected a floating dtype, got torch.int64"):
        sigmoid_mix(x.long(), other, gate, bias)
    with pytest.raises(ValueError, match=r"^bias: expected \[3\], got shape \(2,\)"):
        sigmoid_mix(x, other, gate, bias[:2])
