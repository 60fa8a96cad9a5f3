"""Queries or keys with a bias of each head, rotated by angles: by the formula, in PyTorch and in Triton."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
from kernels.rotation import OP, rotation

from .op_contract import BACKENDS, DEVICE, OpContract, Tensors


class TestRotation(OpContract):
    op = "rotation"
    # B, T, G, H, E, K and P
    sizes = ((2, 5, 1, 1, 1, 4, 2), (1, 33, 1, 4, 1, 7, 2), (2, 17, 2, 6, 3, 16, 8), (1, 18, 3, 3, 1, 128, 32))
    some_sizes = sizes[2]
    device_sizes = ((4, 1023, 1, 32, 1, 128, 32), (1, 3001, 2, 8, 4, 64, 32), (2, 65, 8, 8, 1, 512, 256))
    rounded_once = ("triton",)
    low = ("x", "y")
    device_tolerance = 1e-5
    subheads = 1  # E of the inputs
    fitting = (1, 5, 2, 4, 1, 4, 2)
    misfits = (
        ({"bias": torch.zeros(3, 4)}, r"bias: shape \(3, 4\) does not fit 2 x 4 channels of x with 1 subheads"),
        (
            {"angles": torch.zeros(1, 5, 4, 3)},
            r"angles: expected \[1, 5, 4, at most 2\], got \(1, 5, 4, 3\)",
        ),
        ({"x": torch.zeros(1, 5, 2, 4).long()}, "x: expected a floating dtype, got torch.int64"),
        ({"subheads": 0}, "subheads: must be at least 1, got 0"),
    )

    def inputs(self, *sizes: int) -> Tensors:
        B, T, G, H, self.subheads, K, P = sizes
        wide = torch.randn(B, T, G * self.subheads, K + 3, device=DEVICE)
        bias = torch.randn(H * self.subheads, K, device=DEVICE)
        return {"x": wide[..., 1:-2], "bias": bias, "angles": 4 * torch.randn(*wide.shape[:2], len(bias), P).to(DEVICE)}

    def call(self, **tensors: Any) -> Tensor:
        return rotation(**{"subheads": self.subheads, **tensors})

    def registered(self, tensors: Tensors) -> Iterable[tuple[Any, ...]]:
        yield *tensors.values(), self.subheads, False

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_recomputed_results_have_the_same_gradients(self, backend: str, monkeypatch: pytest.MonkeyPatch):
        run, calls = OP.load(backend), []
        monkeypatch.setitem(OP.implementations, backend, lambda *args: calls.append(args) or run(*args))
        inputs, gradients = self.inputs(*self.some_sizes), []
        for recompute in (False, True):
            leaves = [x.detach().requires_grad_() for x in inputs.values()]
            with kernels.backend(backend), kernels.recomputing(recompute):
                loss = rotation(*leaves, subheads=self.subheads).pow(2).sum()  # which saves y
            gradients.append(torch.autograd.grad(loss, leaves))
        assert all(map(torch.equal, *gradients))
        assert len(calls) == 3  # once more in the backward pass

    def test_gradients_are_those_of_finite_differences(self):
        inputs = [x.double().requires_grad_() for x in self.inputs(1, 3, 2, 4, 2, 5, 2).values()]
        assert torch.autograd.gradcheck(lambda *args: rotation(*args, subheads=2), inputs)

    @pytest.mark.parametrize("backend", ["reference", *BACKENDS])
    def test_angles_in_half_precision_are_multiplied_in_fp32(self, backend: str):
        inputs = self.inputs(*self.some_sizes)
        inputs |= {name: inputs[name].bfloat16() for name in ("x", "angles")}
        exact = self.results({name: x.double() for name, x in inputs.items()}, "torch")
        for name, x in self.results(inputs, backend).items():
            assert (x - exact[name]).norm() < 1e-2 * exact[name].norm()


def test_a_quarter_turn():
    x = torch.arange(1.0, 6.0).view(1, 1, 1, 5)
    expected = torch.tensor([-2.0, 1.0, 3.0, 4.0, 5.0]).view(1, 1, 1, 5)
    torch.testing.assert_close(rotation(x, torch.zeros(1, 5), torch.full((1, 1, 1, 1), 0.25)), expected)
