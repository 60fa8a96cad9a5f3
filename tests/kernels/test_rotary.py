"""Rotary positions: by the formula, in PyTorch and in Triton."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels

from .op_contract import DEVICE, OpContract, SeveralResults, Tensors


class TestRotary(OpContract):
    op = "rotary"
    # B, T, H, D, P and rows of positions
    sizes = (
        (2, 5, 1, 4, 2, 1),
        (1, 33, 4, 7, 2, 1),
        (2, 17, 6, 16, 8, 2),
        (3, 1, 3, 96, 32, 3),
        (1, 3, 40, 128, 64, 1),
    )
    some_sizes = sizes[2]
    device_sizes = ((4, 1023, 8, 128, 64, 1), (2, 3001, 3, 64, 16, 2), (64, 1, 16, 64, 32, 64), (1, 65, 4, 256, 96, 1))
    rounded_once = ("triton",)
    low = ("x", "y")
    device_tolerance = 1e-4  # positions reach 3,000, whose angles fp32 rounds by up to 1e-4
    positions: Tensor
    rates: Tensor

    def inputs(self, *sizes: int) -> Tensors:
        B, T, H, D, P, rows = sizes
        self.positions = torch.randint(0, 3000, (rows, T), device=DEVICE)
        self.rates = 10000.0 ** -torch.linspace(0, 1, P, device=DEVICE)
        return {"x": torch.randn(B, T, H * D + 3, device=DEVICE)[..., 1:-2].unflatten(-1, (H, D))}

    def call(self, **tensors: Tensor) -> Tensor:
        rates = self.rates.double() if tensors["x"].dtype == torch.float64 else self.rates
        return kernels.rotary(**tensors, positions=self.positions, rates=rates, amplitude=1.2)

    def registered(self, tensors: Tensors) -> Iterable[tuple[Any, ...]]:
        yield *tensors.values(), None, self.positions, self.rates, 1.2, False, False

    def test_gradients_are_those_of_finite_differences(self):
        inputs = [x.double().requires_grad_() for x in self.inputs(2, 3, 2, 7, 3, 2).values()]
        assert torch.autograd.gradcheck(lambda x: self.call(x=x), inputs)


class TestRotaryOfTwo(SeveralResults):
    op = "rotary"
    outputs = ("y", "z")
    # B, T, H, D, H', D', P, rows of positions, and whether the last channels turn
    sizes = (
        (1, 5, 4, 8, 2, 8, 4, 1, False),
        (2, 17, 3, 7, 5, 4, 2, 2, True),
        (3, 1, 9, 12, 1, 8, 4, 3, True),
        (1, 3, 40, 128, 2, 128, 64, 1, False),
    )
    some_sizes = sizes[1]
    device_sizes = ((4, 1023, 8, 192, 1, 64, 32, 1, True), (64, 1, 16, 64, 4, 64, 32, 64, False))
    rounded_once = ("triton",)
    low = ("x", "other", "y", "z")
    device_tolerance = 1e-4  # positions reach 3,000, whose angles fp32 rounds by up to 1e-4
    positions: Tensor
    rates: Tensor
    last: bool

    def inputs(self, *sizes: int) -> Tensors:
        B, T, H, D, heads, size, P, rows, self.last = sizes
        self.positions = torch.randint(0, 3000, (rows, T), device=DEVICE)
        self.rates = 10000.0 ** -torch.linspace(0, 1, P, device=DEVICE)
        x, other = torch.randn(B, T, H * D + heads * size, device=DEVICE).split([H * D, heads * size], -1)
        return {"x": x.unflatten(-1, (H, D)), "other": other.unflatten(-1, (heads, size))}

    def call(self, **tensors: Tensor) -> Any:
        rates = self.rates.double() if tensors["x"].dtype == torch.float64 else self.rates
        return kernels.rotary(**tensors, positions=self.positions, rates=rates, amplitude=1.2, last=self.last)

    def registered(self, tensors: Tensors) -> Iterable[tuple[Any, ...]]:
        yield *tensors.values(), self.positions, self.rates, 1.2, self.last, False

    @pytest.mark.parametrize("backend", ["reference", "torch", "triton"])
    def test_each_turns_as_alone(self, sizes: tuple[Any, ...], backend: str):
        inputs = self.inputs(*sizes)
        with kernels.backend(backend):
            assert all(
                torch.equal(together, self.call(x=alone))
                for together, alone in zip(self.call(**inputs), inputs.values(), strict=True)
            )


@pytest.mark.parametrize("backend", ["reference", "torch", "triton"])
def test_a_quarter_turn(backend: str):
    x = torch.arange(1.0, 6.0).view(1, 1, 1, 5)
    with kernels.backend(backend):
        y = kernels.rotary(x, torch.tensor([[3]]), torch.tensor([torch.pi / 6, torch.pi / 3]))
        last = kernels.rotary(x, torch.tensor([[3]]), torch.tensor([torch.pi / 6, torch.pi / 3]), last=True)
    torch.testing.assert_close(y.flatten(), torch.tensor([-3.0, -2.0, 1.0, -4.0, 5.0]))
    torch.testing.assert_close(last.flatten(), torch.tensor([1.0, -4.0, -3.0, 2.0, -5.0]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"x": torch.zeros(1, 5, 4)}, r"x: expected a floating \[B,T,H,D\], got torch.float32 \(1, 5, 4\)"),
        ({"x": torch.zeros(1, 5, 2, 4).long()}, r"x: expected a floating \[B,T,H,D\], got torch.int64"),
        (
            {"other": torch.zeros(1, 4, 2, 4)},
            r"other: expected a floating \[1,5,H,D\], got torch.float32 \(1, 4, 2, 4\)",
        ),
        (
            {"other": torch.zeros(1, 5, 1, 3)},
            r"rates: expected \[at most 1\] in at least fp32, got torch.float32 \(2,\)",
        ),
        ({"positions": torch.zeros(2, 5).long()}, r"positions: expected integers \[1,5\] or \[1,5\], got torch.int64"),
        ({"positions": torch.zeros(1, 5)}, r"positions: expected integers \[1,5\] or \[1,5\], got torch.float32"),
        ({"rates": torch.zeros(3)}, r"rates: expected \[at most 2\] in at least fp32, got torch.float32 \(3,\)"),
        ({"rates": torch.zeros(2).bfloat16()}, r"rates: expected \[at most 2\] in at least fp32, got torch.bfloat16"),
    ],
)
def test_misfits(change: dict[str, Tensor], said: str):
    fitting = {"x": torch.zeros(1, 5, 2, 4), "positions": torch.zeros(1, 5).long(), "rates": torch.zeros(2)}
    with pytest.raises(ValueError, match=f"^{said}"):
        kernels.rotary(**fitting | change)
