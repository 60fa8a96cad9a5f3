"""Decays and input gates of raw gates: by the formula, and computed again instead of saved."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
from kernels.forget_gate import lower_bound_odds

from .comparisons import assert_near, assert_repeats, interpreted


def inputs(*shape: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {"x": (3 * torch.randn(shape)).to(dtype), "bias": torch.randn(shape[-1]), "odds": torch.randn(shape[-1])}


def results(a: dict[str, Tensor], backend: str, scale: float = 1.0) -> dict[str, Tensor]:
    """The decays and all gradients."""
    leaves = {name: x.detach().requires_grad_() for name, x in a.items()}
    with kernels.backend(backend):
        y = kernels.forget_gate(**leaves, scale=scale)
    arriving = torch.randn(y.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(y)
    return {"y": y.detach(), **dict(zip(a, torch.autograd.grad(y, list(leaves.values()), arriving), strict=True))}


@pytest.mark.parametrize("given", [("x",), ("x", "bias"), ("x", "odds"), ("x", "bias", "odds")])
@pytest.mark.parametrize("shape", [(1, 1), (2, 7, 5), (40, 12)])
def test_by_the_formula(given: tuple[str, ...], shape: tuple[int, ...]):
    a = {name: x for name, x in inputs(*shape).items() if name in given}
    expected = results({name: x.double() for name, x in a.items()}, "reference", 0.25)
    for name, x in results(a, "torch", 0.25).items():
        torch.testing.assert_close(x, expected[name].float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("odds", [None, -200.0, 0.0, 200.0])
def test_extreme_gates(odds: float | None):
    a = {"x": torch.tensor([-200.0, -90.0, 0.0, 90.0, 200.0])[:, None]}
    if odds is not None:
        a["odds"] = torch.tensor([odds])
    expected = results({name: x.double() for name, x in a.items()}, "reference")  # whose sigmoids do not underflow
    for name, x in results(a, "torch").items():
        torch.testing.assert_close(x, expected[name].float(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("given", [("x",), ("x", "bias"), ("x", "odds"), ("x", "bias", "odds")])
@pytest.mark.parametrize("shape", [(1, 1), (2, 7, 5), (70, 300), (2, 3, 2, 40)])
def test_triton(given: tuple[str, ...], shape: tuple[int, ...], poison: None):
    a = {name: x for name, x in inputs(*shape).items() if name in given}
    expected = results(a, "torch", 0.25)
    for name, x in results(a, "triton", 0.25).items():
        torch.testing.assert_close(x, expected[name], rtol=1e-5, atol=2e-6)


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


@pytest.mark.gpu
@pytest.mark.parametrize("given", [("x",), ("x", "bias"), ("x", "odds"), ("x", "bias", "odds")])
@pytest.mark.parametrize("shape", [(4, 1000, 1024), (2, 777, 8192), (1, 3, 100)])
def test_triton_on_device(given: tuple[str, ...], shape: tuple[int, ...]):
    a = {name: x.cuda() for name, x in inputs(*shape).items() if name in given}
    expected = results({name: x.double() for name, x in a.items()}, "torch", 0.25)
    actual = results(a, "triton", 0.25)
    for name, x in actual.items():
        torch.testing.assert_close(
            x, expected[name].float(), rtol=1e-4, atol=1e-4 if name in ("bias", "odds") else 1e-5
        )
    assert_repeats(partial(results, a, "triton", 0.25), 1)


def low_rank(rank: int, size: int, rows: tuple[int, ...] = (2, 70)) -> dict[str, Tensor]:
    return {"x": torch.randn(*rows, rank), "weight": torch.randn(size, rank), "bias": torch.randn(size)}


def low_rank_results(a: dict[str, Tensor], backend: str) -> dict[str, Tensor]:
    leaves = {name: x.detach().requires_grad_() for name, x in a.items()}
    with kernels.backend(backend):
        y = kernels.low_rank_forget_gate(**leaves, scale=0.25)
    arriving = torch.randn(y.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(y)
    return {"y": y.detach(), **dict(zip(a, torch.autograd.grad(y, list(leaves.values()), arriving), strict=True))}


@pytest.mark.slow
@pytest.mark.pairwise
@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=interpreted)])
@pytest.mark.parametrize(("rank", "size"), [(16, 128), (3, 5), (20, 300), (64, 40), (1, 1)])
@pytest.mark.parametrize("given", [("x", "weight"), ("x", "weight", "bias")])
def test_low_rank_by_the_formula(backend: str, rank: int, size: int, given: tuple[str, ...], poison: None):
    a = {name: x for name, x in low_rank(rank, size).items() if name in given}
    expected = low_rank_results({name: x.double() for name, x in a.items()}, "reference")
    for name, x in low_rank_results(a, backend).items():
        torch.testing.assert_close(x, expected[name].float(), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize(("rank", "size"), [(16, 300), (16, 256), (40, 250), (3, 5)])
@pytest.mark.parametrize("given", [("x", "weight"), ("x", "weight", "bias")])
def test_low_rank_by_the_launches_of_half_precision(
    rank: int, size: int, given: tuple[str, ...], poison: None, monkeypatch: pytest.MonkeyPatch
):
    module = pytest.importorskip("kernels.forget_gate.gpu.low_rank")
    monkeypatch.setattr(module, "BACKWARD_OF_FP32", module.BACKWARD_OF_HALF)
    monkeypatch.setattr(module, "walkers", lambda *sizes: 2)  # so that a program walks over several tiles
    a = {name: x for name, x in low_rank(rank, size, (3, 67)).items() if name in given}
    expected = low_rank_results({name: x.double() for name, x in a.items()}, "reference")
    for name, x in low_rank_results(a, "triton").items():
        torch.testing.assert_close(x, expected[name].float(), rtol=1e-4, atol=1e-4)


@interpreted
def test_low_rank_decays_in_bf16_before_they_are_rounded(monkeypatch: pytest.MonkeyPatch):
    module = pytest.importorskip("kernels.forget_gate.gpu.low_rank")  # the interpreter has no products in bf16
    monkeypatch.setattr(module, "log_sigmoid", module.log_sigmoid_for_bf16)
    a = {"x": torch.linspace(-12, 12, 500)[None, :, None], "weight": torch.ones(1, 1)}
    expected = low_rank_results({name: x.double() for name, x in a.items()}, "reference")["y"].float()
    actual = low_rank_results(a, "triton")["y"]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)
    assert (actual / expected - 1).abs().max() > 3e-6  # of the shorter polynomial, not of `log_sigmoid`


@interpreted
def test_low_rank_gates_in_bf16_under_the_interpreter(poison: None):
    a = {name: x.bfloat16() for name, x in low_rank(3, 5, (1, 7)).items()}
    expected = low_rank_results({name: x.double() for name, x in a.items()}, "reference")
    for name, x in low_rank_results(a, "triton").items():
        assert x.dtype == torch.bfloat16
        assert (x - expected[name]).norm() < 1e-2 * expected[name].norm(), name


@interpreted
def test_extreme_low_rank_gates():
    a = {"x": torch.tensor([[[-300.0], [-90.0], [0.0], [43.0], [90.0], [300.0]]]), "weight": torch.ones(3, 1)}
    expected = low_rank_results({name: x.double() for name, x in a.items()}, "reference")
    for name, x in low_rank_results(a, "triton").items():
        torch.testing.assert_close(x, expected[name].float(), rtol=1e-5, atol=1e-6)


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


@interpreted
def test_a_rank_beyond_the_kernel_takes_a_separate_product(poison: None):
    """As in Mamba1 of 1.5B parameters."""
    a = low_rank(65, 10)
    expected = low_rank_results({name: x.double() for name, x in a.items()}, "reference")
    with kernels.implementations() as ran:
        actual = low_rank_results(a, "triton")
    for name, x in actual.items():
        torch.testing.assert_close(x, expected[name].float(), rtol=1e-4, atol=1e-4)
    assert ran["forget_gate"] == {"triton"}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"x": torch.zeros(2, 4)}, r"x: expected \[B,T,R\]"),
        ({"weight": torch.zeros(10, 3)}, r"weight: expected \[C,16\]"),
        ({"bias": torch.zeros(3)}, r"bias: expected \[10\]"),
    ],
)
def test_what_does_not_fit_a_low_rank(wrong: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=f"^{said}"):
        kernels.low_rank_forget_gate(**low_rank(16, 10) | wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rank", "size"), [(16, 8192), (16, 1000), (24, 512), (64, 1024)])
def test_low_rank_on_device(rank: int, size: int, dtype: torch.dtype):
    a = {name: x.cuda() if name == "bias" else x.cuda().to(dtype) for name, x in low_rank(rank, size, (3, 777)).items()}
    expected = low_rank_results({name: x.double() for name, x in a.items()}, "torch")
    assert_near(low_rank_results(a, "triton"), expected, 1e-5 if dtype == torch.float32 else 5e-3)
    assert_repeats(partial(low_rank_results, a, "triton"), 1)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_bounds_near_1_keep_their_digits(backend: str):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    odds = torch.linspace(-5, 25, 61, device=device)
    x = torch.linspace(-9, 0, 19, device=device)[:, None].expand(-1, 61)
    with kernels.backend(backend):
        actual = kernels.forget_gate(x, None, odds)
    share = torch.sigmoid(-odds.double())  # log(1 − share · (1 − σ(x)))
    expected = torch.log1p(-share * torch.sigmoid(-x.double()))
    assert ((actual - expected) / expected).abs().max() < 1e-5


def test_half_precision_makes_fp32():
    a = inputs(3, 4, 6, dtype=torch.bfloat16)
    actual = results(a, "torch")
    expected = results({name: x.float() for name, x in a.items()}, "torch")
    assert actual["y"].dtype == torch.float32
    assert torch.equal(actual["y"], expected["y"])
    assert actual["x"].dtype == torch.bfloat16
    assert torch.equal(actual["x"], expected["x"].bfloat16())
    assert torch.equal(actual["odds"], expected["odds"])


def tied_results(a: dict[str, Tensor], backend: str, read: tuple[bool, bool] = (True, True)) -> dict[str, Tensor]:
    """Decays and input gates at a scale of 0.125, and the gradients from those that are read."""
    leaves = {name: x.detach().requires_grad_() for name, x in a.items()}
    with kernels.backend(backend):
        both = kernels.tied_gates(**leaves, scale=0.125, dtype=torch.promote_types(a["x"].dtype, torch.float32))
    pairs = [(y, seed) for seed, (y, used) in enumerate(zip(both, read, strict=True)) if used]
    arriving = [torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)).to(y) for y, seed in pairs]
    gradients = torch.autograd.grad([y for y, _ in pairs], list(leaves.values()), arriving)
    return {"log_decay": both[0].detach(), "written": both[1].detach(), **dict(zip(a, gradients, strict=True))}


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=[interpreted, pytest.mark.slow])])
@pytest.mark.parametrize("read", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("given", [("x",), ("x", "bias", "odds")])
def test_gates_tied_to_decays(given: tuple[str, ...], read: tuple[bool, bool], backend: str, poison: None):
    a = {name: x for name, x in inputs(2, 70, 5).items() if name in given}
    expected = tied_results({name: x.double() for name, x in a.items()}, "torch", read)
    torch.testing.assert_close(expected["written"], 1 - expected["log_decay"].exp())
    for name, x in tied_results(a, backend, read).items():
        torch.testing.assert_close(x, expected[name].float(), rtol=1e-5, atol=2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4, 1000, 1024), (1, 3, 100)])
def test_gates_tied_to_decays_on_device(shape: tuple[int, ...]):
    a = {name: x.cuda() for name, x in inputs(*shape).items()}
    expected = tied_results({name: x.double() for name, x in a.items()}, "torch")
    assert_near(tied_results(a, "triton"), expected, 1e-5)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_input_gates_keep_their_digits(backend: str):
    x = torch.linspace(-3, 80, 300, device="cuda" if torch.cuda.is_available() else "cpu")
    with kernels.backend(backend):
        _, written = kernels.tied_gates(x, scale=0.125, dtype=torch.float32)
        assert kernels.tied_gates(x, dtype=torch.bfloat16)[1].dtype == torch.bfloat16
    expected = -torch.expm1(0.125 * torch.nn.functional.logsigmoid(x.double()))  # 1 − exp would often be 0
    torch.testing.assert_close(written, expected.float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=interpreted)])
def test_the_results_are_computed_again_instead_of_saved(backend: str):
    a = {name: x.requires_grad_() for name, x in inputs(2, 5, 6).items()}

    def run() -> tuple[Tensor, Tensor, Tensor]:
        with kernels.backend(backend):
            log_decay, k = kernels.tied_gates(**a, dtype=torch.float32)
        return log_decay, k, log_decay.sin() + k.sin()

    expected = torch.autograd.grad(run()[2].sum(), list(a.values()))
    with kernels.recomputing():
        log_decay, k, y = run()
    sines = [node for node, _ in y.grad_fn.next_functions]
    for x, sine in zip((log_decay, k), sines, strict=True):
        assert sine._saved_self.data_ptr() != x.data_ptr()  # made anew for whoever reads it
    actual = torch.autograd.grad(y.sum(), list(a.values()))
    assert all(torch.equal(x, z) for x, z in zip(actual, expected, strict=True))


@pytest.mark.parametrize("wrong", [{"bias": torch.zeros(3)}, {"odds": torch.zeros(2, 4)}])
def test_what_does_not_fit(wrong: dict[str, Any]):
    for gates in (kernels.forget_gate, partial(kernels.tied_gates, dtype=torch.float32)):
        with pytest.raises(ValueError, match=rf"^{next(iter(wrong))}: expected \[4\]"):
            gates(torch.zeros(2, 4), **wrong)


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
