"""Gates of Mamba-3: by their formulas, in PyTorch and in Triton."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
from kernels.trapezoid import trapezoid

from .op_contract import BACKENDS, DEVICE, SeveralResults, Tensors


class TestTrapezoid(SeveralResults):
    op = "trapezoid"
    outputs = ("log_decay", "dt", "share")
    sizes = ((1, 1, 1), (2, 5, 3), (1, 70, 32))
    some_sizes = (2, 37, 24)
    device_sizes = ((4, 4097, 32), (1, 1025, 200))
    low = ("a", "r", "w")
    low_tolerances = (1e-2, 1e-3)

    def inputs(self, B: int, T: int, M: int) -> Tensors:
        """Columns of a projection."""
        columns = (3 * torch.randn(B, T, 3 * M + 2, device=DEVICE))[..., 1:-1].split(M, -1)
        return {**dict(zip(("a", "r", "w"), columns, strict=True)), "dt_bias": torch.randn(M, device=DEVICE)}

    def call(self, **tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return trapezoid(**tensors)

    def registered(self, tensors: Tensors) -> Iterable[tuple[Any, ...]]:
        yield *tensors.values(), False


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_rates_at_zero_and_below_the_slowest_one(backend: str):
    r = torch.tensor([-1e9, -3.0, 0.0, 2.0], device=DEVICE, requires_grad=True)
    zeros = torch.zeros(4, device=DEVICE)
    with kernels.backend(backend):
        log_decay, dt, share = trapezoid(zeros, r, zeros, zeros)
    rates, slopes = torch.tensor([1e-4, 0.25, 1, 3], device=DEVICE), torch.tensor([0, 1 / 16, 1, 1], device=DEVICE)
    torch.testing.assert_close(-log_decay / dt, rates)
    torch.testing.assert_close(torch.autograd.grad(-log_decay.sum(), r)[0], slopes * dt)
    torch.testing.assert_close(share, torch.full_like(share, 0.5))


@pytest.mark.parametrize("name", ["r", "w", "dt_bias"])
def test_arguments_that_do_not_fit(name: str):
    tensors = {"a": torch.zeros(2, 3), "r": torch.zeros(2, 3), "w": torch.zeros(2, 3), "dt_bias": torch.zeros(3)}
    with pytest.raises(ValueError, match=rf"^{name}: expected \[.*3\], got shape \(2, 4\)"):
        trapezoid(**tensors | {name: torch.zeros(2, 4)})
