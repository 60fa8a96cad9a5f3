"""Decays and input gates of raw gates: by the formulas, in Triton, and computed again instead of saved."""

import math
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from kernels.forget_gate import lower_bound_odds

from .op_contract import BACKENDS, DEVICE, OpContract, SeveralResults, Tensors, interpreted

NAMES = ((), ("bias",), ("odds",), ("bias", "odds"))
BOTH = ("bias", "odds")


def inputs(*shape: int, given: tuple[str, ...] = BOTH) -> Tensors:
    tensors = {"x": 3 * torch.randn(shape), "bias": torch.randn(shape[-1]), "odds": torch.randn(shape[-1])}
    return {name: x.to(DEVICE) for name, x in tensors.items() if name in ("x", *given)}


class TestForgetGate(OpContract):
    op = "forget_gate_triton"
    sizes = (
        *product(((1, 1), (2, 7, 5), (40, 12)), NAMES),
        *(pytest.param(each, marks=pytest.mark.slow) for each in product(((70, 300), (2, 3, 2, 40)), NAMES)),
    )
    some_sizes = ((2, 7, 5), BOTH)
    formula_sizes = tuple(product(((2, 7, 5),), NAMES))
    device_sizes = tuple(product(((4, 1000, 1024), (2, 777, 8192), (1, 3, 100)), NAMES))
    interpreted_only = True
    settings = (0.25,)
    low = ("x",)
    exact = torch.float64
    tolerances = (1e-5, 2e-6)
    fitting = ((2, 4), ())
    misfits = (
        ({"bias": torch.zeros(3)}, r"bias: expected \[4\]"),
        ({"odds": torch.zeros(2, 4)}, r"odds: expected \[4\]"),
    )

    def inputs(self, shape: tuple[int, ...], given: tuple[str, ...]) -> Tensors:
        return inputs(*shape, given=given)

    def call(self, **tensors: Tensor) -> Tensor:
        return kernels.forget_gate(**tensors, scale=0.25)

    def formula(self, x, bias=0, odds=None) -> Tensor:
        share = torch.sigmoid(x + bias)
        return 0.25 * (share if odds is None else odds.sigmoid() + (1 - odds.sigmoid()) * share).log()

    @pytest.mark.parametrize("odds", [None, -200.0, 0.0, 200.0])
    def test_extreme_gates(self, odds: float | None):
        tensors = {"x": torch.tensor([-200.0, -90.0, 0.0, 90.0, 200.0])[:, None]}
        if odds is not None:
            tensors["odds"] = torch.tensor([odds])
        self.agree(tensors, "torch")  # with fp64, whose sigmoids do not underflow


class TestTiedGates(SeveralResults):
    op = "tied_gates_triton"
    outputs = ("log_decay", "written")
    sizes = (((2, 70, 5), ()), ((2, 70, 5), BOTH))
    some_sizes = ((2, 70, 5), BOTH)
    formula_sizes = sizes
    device_sizes = (((4, 1000, 1024), BOTH), ((1, 3, 100), BOTH))
    interpreted_only = True
    settings = (0.125, torch.float32)
    low = ("x",)
    exact = torch.float64
    tolerances = (1e-5, 2e-6)
    device_tolerance = 1e-5
    fitting = ((2, 4), ())
    misfits = TestForgetGate.misfits

    def inputs(self, shape: tuple[int, ...], given: tuple[str, ...]) -> Tensors:
        return inputs(*shape, given=given)

    def call(self, **tensors: Tensor) -> tuple[Tensor, Tensor]:
        return kernels.tied_gates(**tensors, scale=0.125, dtype=torch.promote_types(tensors["x"].dtype, torch.float32))

    def formula(self, x, bias=0, odds=None) -> tuple[Tensor, Tensor]:
        share = torch.sigmoid(x + bias)
        forget = (share if odds is None else odds.sigmoid() + (1 - odds.sigmoid()) * share) ** 0.125
        return forget.log(), 1 - forget

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_the_results_are_computed_again_instead_of_saved(self, backend: str):
        leaves = [x.requires_grad_() for x in self.inputs(*self.some_sizes).values()]
        with kernels.backend(backend), kernels.recomputing():
            results = kernels.tied_gates(*leaves, dtype=torch.float32)
            sines = [x.sin() for x in results]
        for x, sine in zip(results, sines, strict=True):
            assert sine.grad_fn._saved_self.data_ptr() != x.data_ptr()  # made anew for whoever reads it


def low_rank(rank: int, size: int, biased: bool = True, rows: tuple[int, ...] = (2, 70)) -> Tensors:
    tensors = {"x": torch.randn(*rows, rank), "weight": torch.randn(size, rank)}
    tensors |= {"bias": torch.randn(size)} if biased else {}
    return {name: x.to(DEVICE) for name, x in tensors.items()}


class TestLowRankForgetGate(OpContract):
    op = "low_rank_forget_gate"
    sizes = tuple(
        pytest.param((rank, size, biased), marks=pytest.mark.slow)
        for rank, size in ((16, 128), (3, 5), (20, 300), (64, 40), (1, 1))
        for biased in (True, False)
    )
    some_sizes = (3, 5, True, (1, 7))
    interpreted_only = True
    device_sizes = tuple((*sizes, True, (3, 777)) for sizes in ((16, 8192), (16, 1000), (24, 512), (64, 1024)))
    settings = (0.25, False)
    low = ("x", "weight", "y")
    exact = torch.float64
    tolerances = (1e-4, 1e-4)
    norm_tolerance = 1e-4
    rounded_once = ()
    device_tolerance = 1e-5
    low_norms = (5e-3, 5e-3)
    fitting = (16, 10)
    misfits = (
        ({"x": torch.zeros(2, 4)}, r"x: expected \[B,T,R\]"),
        ({"weight": torch.zeros(10, 3)}, r"weight: expected \[C,16\]"),
        ({"bias": torch.zeros(3)}, r"bias: expected \[10\]"),
    )

    def inputs(self, *sizes: Any) -> Tensors:
        return low_rank(*sizes)

    def call(self, **tensors: Tensor) -> Tensor:
        return kernels.low_rank_forget_gate(**tensors, scale=0.25)

    def formula(self, x, weight, bias=0) -> Tensor:
        return 0.25 * F.logsigmoid(x @ weight.T + bias)

    @pytest.mark.slow
    @interpreted
    @pytest.mark.parametrize(("rank", "size"), [(16, 300), (16, 256), (40, 250), (3, 5)])
    @pytest.mark.parametrize("biased", [False, True])
    def test_the_launches_of_half_precision(self, rank: int, size: int, biased: bool, monkeypatch: pytest.MonkeyPatch):
        module = pytest.importorskip("kernels.forget_gate.gpu.low_rank")
        monkeypatch.setattr(module, "BACKWARD_OF_FP32", module.BACKWARD_OF_HALF)
        monkeypatch.setattr(module, "walkers", lambda *sizes: 2)  # so that a program walks over several tiles
        self.agree(low_rank(rank, size, biased, (3, 67)), "triton")

    @interpreted
    def test_decays_in_bf16_before_they_are_rounded(self, monkeypatch: pytest.MonkeyPatch):
        module = pytest.importorskip("kernels.forget_gate.gpu.low_rank")  # the interpreter has no products in bf16
        monkeypatch.setattr(module, "log_sigmoid", module.log_sigmoid_for_bf16)
        tensors = {"x": torch.linspace(-12, 12, 500)[None, :, None], "weight": torch.ones(1, 1)}
        expected = self.results({name: x.double() for name, x in tensors.items()}, "reference")["y"].float()
        actual = self.results(tensors, "triton")["y"]
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)
        assert (actual / expected - 1).abs().max() > 3e-6  # of the shorter polynomial, not of `log_sigmoid`

    @interpreted
    def test_everything_in_bf16(self):
        tensors = {name: x.bfloat16() for name, x in self.inputs(*self.some_sizes).items()}
        expected = self.results({name: x.double() for name, x in tensors.items()}, "reference")
        for name, x in self.results(tensors, "triton").items():
            assert x.dtype == torch.bfloat16
            assert (x - expected[name]).norm() < 1e-2 * expected[name].norm(), name

    @interpreted
    def test_extreme_gates(self):
        x = torch.tensor([[[-300.0], [-90.0], [0.0], [43.0], [90.0], [300.0]]])
        tensors = {"x": x, "weight": torch.ones(3, 1)}
        expected = self.results({name: x.double() for name, x in tensors.items()}, "reference")
        for name, actual in self.results(tensors, "triton").items():
            torch.testing.assert_close(actual, expected[name].float(), rtol=1e-5, atol=1e-6)

    @interpreted
    def test_a_rank_beyond_the_kernel_takes_a_separate_product(self):
        """As in Mamba1 of 1.5B parameters."""
        with kernels.implementations() as ran:
            self.agree(low_rank(65, 10), "triton")
        assert "triton" in ran["forget_gate"]


@interpreted
def test_triton_takes_parts_of_a_projection_and_extreme_gates(poison: None):
    whole = torch.randn(2, 30, 20).requires_grad_()
    extreme = torch.tensor([-200.0, -90.0, 90.0, 200.0])
    odds = torch.tensor([-200.0, -1.0, 0.0, 1.0, 2.0, 3.0, 90.0, 200.0])
    actual = []
    for backend in ("triton", "torch"):
        part, rest = whole.split([8, 12], -1)
        with kernels.backend(backend):
            y = kernels.forget_gate(part + 0, odds=odds) + kernels.forget_gate(part, bias=extreme.repeat(2))
        actual.append([y, *torch.autograd.grad(y.sin().sum() + rest.sum(), whole)])
    for x, expected in zip(*actual, strict=True):
        torch.testing.assert_close(x, expected, rtol=1e-5, atol=2e-6)


@interpreted
def test_low_rank_of_a_part_of_a_projection_is_computed_again(poison: None):
    whole = torch.randn(2, 30, 20).requires_grad_()
    a = low_rank(8, 24)
    actual = []
    for backend, repeated in (("triton", True), ("triton", False), ("torch", False)):
        with kernels.backend(backend), kernels.recomputing(repeated):
            part, rest = whole.split([8, 12], -1)
            y = kernels.low_rank_forget_gate(part, a["weight"], a["bias"]).sin()
        actual.append([y, *torch.autograd.grad(y.sum() + rest.sum(), whole)])
    assert all(torch.equal(x, z) for x, z in zip(actual[0], actual[1], strict=True))
    for x, z in zip(actual[0], actual[2], strict=True):
        torch.testing.assert_close(x, z, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_bounds_near_1_keep_their_digits(backend: str):
    odds = torch.linspace(-5, 25, 61, device=DEVICE)
    x = torch.linspace(-9, 0, 19, device=DEVICE)[:, None].expand(-1, 61)
    with kernels.backend(backend):
        actual = kernels.forget_gate(x, None, odds)
    share = torch.sigmoid(-odds.double())  # log(1 − share · (1 − σ(x)))
    expected = torch.log1p(-share * torch.sigmoid(-x.double()))
    assert ((actual - expected) / expected).abs().max() < 1e-5


def test_half_precision_makes_fp32():
    a, contract = inputs(3, 4, 6), TestForgetGate()
    a["x"] = a["x"].bfloat16()
    actual = contract.results(a, "torch")
    expected = contract.results({name: x.float() for name, x in a.items()}, "torch")
    assert actual["y"].dtype == torch.float32
    assert torch.equal(actual["y"], expected["y"])
    assert actual["dx"].dtype == torch.bfloat16
    assert torch.equal(actual["dx"], expected["dx"].bfloat16())
    assert torch.equal(actual["dodds"], expected["dodds"])


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_input_gates_keep_their_digits(backend: str):
    x = torch.linspace(-3, 80, 300, device=DEVICE)
    with kernels.backend(backend):
        _, written = kernels.tied_gates(x, scale=0.125, dtype=torch.float32)
        assert kernels.tied_gates(x, dtype=torch.bfloat16)[1].dtype == torch.bfloat16
    expected = -torch.expm1(0.125 * torch.nn.functional.logsigmoid(x.double()))  # 1 − exp would often be 0
    torch.testing.assert_close(written, expected.float(), rtol=1e-5, atol=0)


def test_gradients_of_a_single_vector():
    x, bias, odds = leaves = [torch.randn(6).requires_grad_() for _ in range(3)]
    results = [torch.autograd.grad(kernels.forget_gate(z, bias, odds).square().sum(), leaves) for z in (x, x[None])]
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_strong_decays_are_not_resets(backend: str):
    x = torch.tensor([-110.0])
    with kernels.backend(backend):
        torch.testing.assert_close(kernels.forget_gate(x), x)
        torch.testing.assert_close(kernels.forget_gate(x, None, x), x + math.log(2))


@pytest.mark.parametrize("backend", ["reference", "torch", "triton"])
def test_negated_low_rank_gates_are_those_of_negated_inputs(backend: str):
    a = {name: x.requires_grad_() for name, x in low_rank(3, 10, (2, 7)).items()}
    with kernels.backend(backend):
        actual = kernels.low_rank_forget_gate(**a, scale=0.5, negated=True)
        expected = kernels.low_rank_forget_gate(-a["x"], a["weight"], -a["bias"], scale=0.5)
    torch.testing.assert_close(actual, expected)
    gradients = (torch.autograd.grad(y.sin().sum(), [*a.values()]) for y in (actual, expected))
    for actual_gradient, expected_gradient in zip(*gradients, strict=True):
        torch.testing.assert_close(actual_gradient, expected_gradient)


@pytest.mark.parametrize("layer", [1, 3, 5])
def test_log_odds_without_gradients_are_those_with_them(layer: int):
    bounds = 3 * torch.randn(6, 700)
    expected = lower_bound_odds(bounds.requires_grad_(), layer)
    with torch.no_grad(), kernels.backend("triton"):
        actual = lower_bound_odds(bounds, layer)
        assert lower_bound_odds(bounds[:, ::7], layer).equal(actual[::7])
    torch.testing.assert_close(actual, expected)
