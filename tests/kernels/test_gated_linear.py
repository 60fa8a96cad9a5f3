"""The gated product with its linear map: by the formula, and in Triton against fp32."""

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels

from .op_contract import DEVICE, OpContract, Tensors, interpreted


class TestGatedLinear(OpContract):
    op = "gated_linear"
    activation = "silu"
    # the shape of the product, and the outputs
    sizes = (((5, 7), 6), ((2, 3, 700), 6))
    some_sizes = ((3, 40), 6)
    device_sizes = (((2, 1000, 2816), 1024),)
    low = ("gate_up", "weight", "y")
    rounded_once = ()
    interpreted_only = True
    norm_tolerance = 1e-5
    device_tolerance = 1e-4
    low_norms = (5e-3, 1e-2)
    fitting = ((2, 3), 5)
    misfits = (
        ({"gate_up": torch.zeros(2, 7)}, "gate_up: 7 channels are not two equal parts"),
        ({"weight": torch.zeros(3, 2)}, "weight: expected"),
        ({"activation": "relu"}, "activation: 'relu' is not one of identity, silu"),
    )

    def inputs(self, shape: tuple[int, ...], outputs: int) -> Tensors:
        a = {"gate_up": torch.randn(*shape[:-1], 2 * shape[-1]), "weight": torch.randn(outputs, shape[-1])}
        return {name: x.to(DEVICE) for name, x in a.items()}

    def call(self, **tensors: Any) -> Tensor:
        return kernels.gated_linear(**{"activation": self.activation, **tensors})

    def formula(self, gate_up, weight) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return ((gate * torch.sigmoid(gate) if self.activation == "silu" else gate) * up) @ weight.T

    def registered(self, tensors: Tensors) -> Iterable[tuple[Any, ...]]:
        for keep in (True, False):
            yield *tensors.values(), self.activation, keep, False

    @interpreted
    def test_no_rows(self):
        tensors = self.inputs((0, 3), 5)
        shapes = ({name: x.shape for name, x in self.results(tensors, each).items()} for each in ("triton", "torch"))
        assert next(shapes) == next(shapes)

    @pytest.mark.gpu
    @pytest.mark.parametrize("mixed", [False, True])
    @pytest.mark.parametrize("again", [False, True])
    def test_autocast_and_recomputation_on_device(self, again: bool, mixed: bool):
        tensors = self.rounded(self.inputs(*self.device_sizes[0]))
        expected = self.results({name: x.float() for name, x in tensors.items()}, "reference")
        tensors["weight"] = tensors["weight"].float() if mixed else tensors["weight"]
        with torch.autocast("cuda", torch.bfloat16, enabled=mixed):
            with kernels.recomputing(again):
                actual = self.results(tensors, "triton")
            repeated = self.results(tensors, "triton")
        assert actual["dweight"].dtype == tensors["weight"].dtype
        for name, x in expected.items():
            assert (actual[name] - x).norm() <= self.low_norms[name != "y"] * x.norm(), name
            assert torch.equal(actual[name], repeated[name]), name


class TestIdentity(TestGatedLinear):
    activation = "identity"


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("again", [True, False])
def test_the_product_is_kept_for_a_weight_or_computed_again(again: bool, learns: bool):
    a = TestGatedLinear().inputs((3, 40), 6)
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
