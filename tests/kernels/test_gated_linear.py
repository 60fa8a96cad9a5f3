"""The gated product with its linear map: by hand, and in Triton against fp32."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels

from .comparisons import DEVICE, assert_near, interpreted

pytestmark = pytest.mark.usefixtures("poison")


def inputs(*shape: int, outputs: int = 6, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    a = {"gate_up": torch.randn(*shape[:-1], 2 * shape[-1]), "weight": torch.randn(outputs, shape[-1])}
    return {name: x.to(DEVICE, dtype) for name, x in a.items()}


def results(a: dict[str, Tensor], backend: str, activation: Any = "silu") -> dict[str, Tensor]:
    """y and all gradients."""
    leaves = {name: x.detach().requires_grad_() for name, x in a.items()}
    with kernels.backend(backend):
        y = kernels.gated_linear(**leaves, activation=activation)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).bfloat16().to(y)
    gradients = torch.autograd.grad(y, list(leaves.values()), dy)
    return {"y": y.detach(), **dict(zip(a, gradients, strict=True))}


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_by_hand(backend: str):
    gate_up, weight = torch.tensor([[1.0, -2.0, 3.0, 5.0]]), torch.tensor([[1.0, 10.0]])
    with kernels.backend(backend):
        assert float(kernels.gated_linear(gate_up, weight, activation="identity")) == 3 - 100
        expected = 3 / (1 + 2.718281828**-1) - 100 / (1 + 2.718281828**2)
        assert float(kernels.gated_linear(gate_up, weight)) == pytest.approx(expected)


@interpreted
@pytest.mark.parametrize("activation", ["silu", "identity"])
@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 700)])
def test_triton(shape: tuple[int, ...], activation: str):
    a = inputs(*shape)
    assert_near(results(a, "triton", activation), results(a, "reference", activation), 1e-5)


@interpreted
def test_no_rows():
    a = {"gate_up": torch.randn(0, 6), "weight": torch.randn(5, 3)}
    assert {name: x.shape for name, x in results(a, "triton").items()} == {
        name: x.shape for name, x in results(a, "torch").items()
    }


@interpreted
def test_the_op_is_registered_properly():
    results(inputs(2, 3), "triton")
    arguments = [x.requires_grad_() for x in inputs(3, 4).values()]
    for keep in (True, False):
        torch.library.opcheck(torch.ops.token_mixer_zoo.gated_linear, (*arguments, "silu", keep, False))


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("again", [True, False])
def test_the_product_is_kept_for_a_weight_or_computed_again(again: bool, learns: bool):
    a = inputs(3, 40)
    leaves = [a["gate_up"].requires_grad_(), *([a["weight"].requires_grad_()] if learns else [])]
    with kernels.backend("triton"):
        with kernels.recomputing() if again else nullcontext():
            y = kernels.gated_linear(**a)
        expected = kernels.gated_linear(**a)
    sizes = [x.numel() for x in y.grad_fn.saved_tensors]
    assert sizes == [a["gate_up"].numel(), a["weight"].numel(), 3 * 40 if learns and not again else 0]
    actual, wanted = (torch.autograd.grad(x.square().sum(), leaves) for x in (y, expected))
    assert all(torch.equal(x, z) for x, z in zip(actual, wanted, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate_up": torch.zeros(2, 7)}, "^gate_up: 7 channels are not two equal parts"),
        ({"weight": torch.zeros(3, 2)}, "^weight: expected"),
        ({"activation": "relu"}, "^activation: 'relu' is not one of identity, silu"),
    ],
)
def test_misfits(change: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        kernels.gated_linear(**{"gate_up": torch.zeros(2, 6), "weight": torch.zeros(5, 3)} | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(1, 5)}, r"^gate_up: expected \[6, 5\], got shape \(6, 4\)"),
        ({"down": torch.zeros(5, 2)}, r"^gate_up: expected \[4, 4\], got shape \(6, 4\)"),
        ({"activation": "relu"}, "^activation: 'relu' is not one of identity, silu"),
    ],
)
@pytest.mark.parametrize("rows", [1, 5])
def test_misfits_of_an_mlp(rows: int, change: dict[str, Any], message: str):
    fitting = {"x": torch.zeros(rows, 4), "gate_up": torch.zeros(6, 4), "down": torch.zeros(5, 3)}
    with pytest.raises(ValueError, match=message):
        kernels.gated_mlp(**fitting | change)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["silu", "identity"])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_on_device(again: bool, activation: str, mixed: bool):
    a = inputs(2, 1000, 2816, outputs=1024, dtype=torch.bfloat16)
    expected = results({name: x.float() for name, x in a.items()}, "reference", activation)
    if mixed:
        a["weight"] = a["weight"].float()
    with torch.autocast("cuda", torch.bfloat16, enabled=mixed), kernels.recomputing(again):
        actual = results(a, "triton", activation)
    assert actual["weight"].dtype == a["weight"].dtype
    assert_near({"y": actual["y"]}, {"y": expected["y"]}, 5e-3)
    assert_near(actual, expected, 1e-2)
    with torch.autocast("cuda", torch.bfloat16, enabled=mixed):
        again = results(a, "triton", activation)
    assert all(torch.equal(actual[name], again[name]) for name in actual)
