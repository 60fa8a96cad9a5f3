"""Decay and β of the gated delta rule: by the formulas, and in Triton."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from kernels.delta_gates import channel_decay

from .op_contract import DEVICE, SeveralResults, Tensors, interpreted


def inputs(*shape: int, bias: bool = True) -> Tensors:
    """Columns of a projection, some of them extreme, and parameters."""
    fused = 5 * torch.randn(*shape[:-1], 2 * shape[-1] + 3)
    fused[(0,) * (len(shape) - 1)][1:4] = torch.tensor([100.0, -100.0, 0.0])  # exponentials would overflow
    tensors = {"a": fused[..., 1 : shape[-1] + 1], "b": fused[..., shape[-1] + 1 : -2]}
    tensors |= {name: torch.randn(shape[-1]) for name in ("A_log", "dt_bias", *(["bias"] if bias else []))}
    return {name: x.to(DEVICE) for name, x in tensors.items()}


def per_channel(*shape: int, rank: int = 0, bias: bool = True) -> Tensors:
    """Inputs for decays [*shape], the last axis of which are channels; with a rank, of inputs of that size."""
    a = inputs(*shape[:-1], bias=bias)
    a |= {"a": 5 * torch.randn(shape).to(DEVICE), "dt_bias": torch.randn(shape[-2:]).to(DEVICE)}
    if not rank:
        return a
    up = torch.randn(shape[-2] * shape[-1], rank) / rank**0.5
    return a | {"a": 5 * torch.randn(*shape[:-2], rank).to(DEVICE), "up": up.to(DEVICE)}


class TestDeltaGates(SeveralResults):
    op = "delta_gates"
    outputs = ("log_decay", "beta")
    sizes = (((1, 1), True), ((2, 70, 5), False), ((3, 400, 8), True), ((9, 100), True))
    some_sizes = ((2, 70, 8), True)
    formula_sizes = (((3, 4, 5), True), ((3, 4, 5), False))
    device_sizes = (((1, 1, 48), False), ((64, 1, 48), True), ((4, 4097, 48), True), ((4, 4097, 48), False))
    low = ("a", "b")
    tolerances = (1e-5, 1e-4)
    device_tolerance = 1e-5
    largest, lower_bound = 2.0, None
    fitting = ((4, 3), True)
    misfits = (
        ({"A_log": torch.zeros(2)}, r"A_log: expected \[3\], got shape \(2,\)"),
        ({"bias": torch.zeros(2)}, r"bias: expected \[3\], got shape \(2,\)"),
        ({"b": torch.zeros(5, 3)}, r"b: expected the shape of a \(4, 3\), got \(5, 3\)"),
    )

    def inputs(self, shape: tuple[int, ...], bias: bool) -> Tensors:
        return inputs(*shape, bias=bias)

    def call(self, **tensors: Tensor) -> tuple[Tensor, Tensor]:
        return kernels.delta_gates(**tensors, largest=self.largest, lower_bound=self.lower_bound)

    def formula(self, a, A_log, dt_bias, b, bias=0) -> tuple[Tensor, Tensor]:
        return -A_log.exp() * F.softplus(a + dt_bias), self.largest * torch.sigmoid(b + bias)

    def registered(self, tensors: Tensors) -> Iterable[tuple[Any, ...]]:
        decays = [tensors[name] for name in ("a", "A_log", "dt_bias")]
        for bias in (tensors["bias"], None):
            yield *decays, tensors["b"], bias, self.largest, self.lower_bound or 0.0, False

    @interpreted
    @pytest.mark.parametrize("low", [("A_log",), ("dt_bias",), ("bias",), ("A_log", "dt_bias")], ids=str)
    def test_parameters_of_different_precision(self, low: tuple[str, ...]):
        tensors = self.inputs(*self.some_sizes)
        tensors |= {name: tensors[name].bfloat16() for name in low}
        actual, expected = self.results(tensors, "triton"), self.results(tensors, "reference")
        for name in low:
            assert actual.pop(f"d{name}").dtype == expected.pop(f"d{name}").dtype == torch.bfloat16
        self.close(actual, expected)


class TestDecaysPerChannel(TestDeltaGates):
    sizes = (((2, 7, 3, 5), 0, True), ((5, 3, 8), 6, False), ((2, 2, 1), 0, True))
    some_sizes = ((2, 70, 8, 4), 0, True)
    formula_sizes = (((3, 4, 5, 2), 0, True), ((3, 4, 5, 2), 6, True))
    device_sizes = (((1, 1, 8, 128), 0, True), ((4, 4097, 8, 128), 0, True), ((1, 65, 32, 256), 0, True))
    device_sizes += (((2, 1001, 6, 96), 0, True),)
    fitting = ((3, 4, 2), 0, True)
    misfits = (
        ({"dt_bias": torch.zeros(3, 3)}, r"dt_bias: expected \[4, 2\], got shape \(3, 3\)"),
        ({"A_log": torch.zeros(2)}, r"A_log: expected \[4\], got shape \(2,\)"),
        ({"b": torch.zeros(3, 5)}, r"b: expected shape \(3, 4\), got \(3, 5\)"),
        ({"up": torch.zeros(8, 6)}, r"up: expected \[8, 2\], got shape \(8, 6\)"),
    )

    def inputs(self, shape: tuple[int, ...], rank: int, bias: bool) -> Tensors:
        return per_channel(*shape, rank=rank, bias=bias)

    def formula(self, a, A_log, dt_bias, b, bias=0, up=None) -> tuple[Tensor, Tensor]:
        raw = a + dt_bias if up is None else (a @ up.T).view(*b.shape, -1) + dt_bias
        rate, bound = A_log.exp()[:, None], self.lower_bound
        decay = -rate * F.softplus(raw) if bound is None else bound * torch.sigmoid(rate * raw)
        return decay, self.largest * torch.sigmoid(b + bias)

    def registered(self, tensors: Tensors) -> Iterable[tuple[Any, ...]]:
        yield from super().registered(tensors)
        yield tensors["a"], tensors["A_log"], tensors["dt_bias"], None, None, 1.0, -5.0, False


class TestBoundedDecaysPerChannel(TestDecaysPerChannel):
    largest, lower_bound = 1.0, -4.0


def test_gates_are_at_least_fp32():
    a = inputs(3, 4, 5)
    wide = {name: x.double() if name in "ab" else x for name, x in a.items()}
    assert [x.dtype for x in kernels.delta_gates(**wide)] == [torch.float64, torch.float64]


@interpreted
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_decays_per_channel_alone(backend: str):
    a = per_channel(2, 7, 3, 5)
    leaves = [a[name].requires_grad_() for name in ("a", "A_log", "dt_bias")]
    actual = []
    for one in (backend, "reference"):
        with kernels.backend(one):
            y = channel_decay(*leaves)
        actual.append([y, *torch.autograd.grad(y.sin().sum(), leaves)])
    torch.testing.assert_close(*actual)
