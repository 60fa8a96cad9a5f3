"""Decays from their raw numbers: by the formula, and in Triton."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kernels

from .op_contract import BACKENDS, DEVICE, SeveralResults, Tensors, interpreted


def inputs(*shape: int) -> Tensors:
    """Columns of a projection, some of them extreme, and parameters."""
    a = 5 * torch.randn(*shape[:-1], shape[-1] + 3)[..., 1:-2]
    extreme = torch.tensor([100.0, -100.0, 0.0])[: shape[-1]]  # a softplus of exponentials would overflow
    a[(0,) * (len(shape) - 1)][: len(extreme)] = extreme
    tensors = {"a": a, "A_log": torch.randn(shape[-1]), "dt_bias": torch.randn(shape[-1])}
    return {name: x.to(DEVICE) for name, x in tensors.items()}


class TestDiscretise(SeveralResults):
    op = "delta_gates"
    outputs = ("log_decay", "dt")
    sizes = ((1, 1), (2, 70, 5), (3, 1000, 8), (40, 100))
    some_sizes = (2, 70, 8)
    device_sizes = ((4, 4097, 48),)
    settings = (None, None, 1.0, 0.0)
    low = ("a",)
    tolerances = (1e-5, 1e-5)
    device_tolerance = 1e-5
    fitting = (4, 3)
    misfits = (({"A_log": torch.zeros(2)}, r"A_log: expected \[3\], got shape \(2,\)"),)

    def inputs(self, *sizes: int) -> Tensors:
        return inputs(*sizes)

    def call(self, **tensors: Tensor) -> tuple[Tensor, Tensor]:
        return kernels.discretise(**tensors)

    def formula(self, a, A_log, dt_bias) -> tuple[Tensor, Tensor]:
        dt = F.softplus(a + dt_bias)
        return -A_log.exp() * dt, dt

    @interpreted
    @pytest.mark.parametrize("low", ["A_log", "dt_bias"])
    def test_parameters_of_different_precision(self, low: str):
        tensors = inputs(2, 70, 8)
        tensors[low] = tensors[low].bfloat16()
        actual, expected = self.results(tensors, "triton"), self.results(tensors, "reference")
        assert actual.pop(f"d{low}").dtype == expected.pop(f"d{low}").dtype == torch.bfloat16
        self.close(actual, expected)


def test_decays_are_at_least_fp32():
    a = inputs(3, 4, 5)
    assert kernels.discretise(**a)[1].dtype == torch.float32
    assert kernels.discretise(a["a"].double(), a["A_log"], a["dt_bias"])[0].dtype == torch.float64


@interpreted
@pytest.mark.parametrize("backend", BACKENDS)
def test_small_steps_keep_their_digits(backend: str):
    a = torch.linspace(-40, 5, 91, device=DEVICE)[:, None]
    with kernels.backend(backend):
        log_decay, dt = kernels.discretise(a, torch.zeros(1, device=DEVICE), torch.zeros(1, device=DEVICE))
    expected = F.softplus(a.double(), threshold=100)
    assert ((dt - expected) / expected).abs().max() < 1e-5
    assert torch.equal(log_decay, -dt)
