"""The readout of Mamba-3: by the formula, in PyTorch and in Triton."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from kernels.skip_readout import skip_readout

from .op_contract import BACKENDS, DEVICE, OpContract, Tensors


def inputs(B: int, T: int, G: int, H: int, E: int, K: int, V: int, gated: bool = True) -> Tensors:
    """Values and gates that are columns of a projection, and other tensors without gaps."""
    tensors = {"o": 3 * torch.randn(B, T, H, V), "q": torch.randn(B, T, G * E, K), "k": torch.randn(B, T, G * E, K)}
    tensors |= {"v": torch.randn(B, T, H * V + 3)[..., 2:-1].unflatten(-1, (H, V)), "beta": torch.rand(B, T, H * E)}
    tensors |= {"q_bias": torch.randn(H * E, K), "k_bias": torch.randn(H * E, K), "D": torch.randn(H)}
    if gated:
        tensors["gate"] = torch.randn(B, T, H * V + 2)[..., 1:-1].unflatten(-1, (H, V))
    return {name: x.to(DEVICE) for name, x in tensors.items()}


class TestSkipReadout(OpContract):
    op = "skip_readout"
    sizes = (
        (1, 1, 1, 1, 1, 1, 1),
        (2, 5, 2, 4, 1, 8, 8, False),
        (1, 17, 2, 6, 3, 5, 11),
        (2, 35, 1, 2, 1, 128, 64),
    )
    some_sizes = (2, 9, 1, 4, 2, 33, 16)
    device_sizes = ((4, 1023, 1, 32, 1, 128, 64), (1, 3001, 2, 8, 4, 64, 128))
    rounded_once = ("triton",)
    low = ("o", "q", "k", "v", "gate", "y")

    def inputs(self, *sizes: Any) -> Tensors:
        return inputs(*sizes)

    def call(self, **tensors: Tensor) -> Tensor:
        return skip_readout(**tensors)

    def registered(self, tensors: Tensors) -> Iterable[tuple[Any, ...]]:
        yield *tensors.values(), False

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_recomputed_results_have_the_same_gradients(self, backend: str):
        tensors, gradients = self.inputs(*self.some_sizes), []
        for recompute in (False, True):
            leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
            with kernels.backend(backend), kernels.recomputing(recompute):
                loss = skip_readout(**leaves).pow(2).sum()  # which saves y
            gradients.append(torch.autograd.grad(loss, [*leaves.values()]))
        assert all(map(torch.equal, *gradients))

    @pytest.mark.parametrize("programs", [1, 10**6])
    def test_heads_of_a_program_do_not_change_results(self, programs: int, monkeypatch: pytest.MonkeyPatch):
        tensors = self.inputs(2, 19, 1, 5, 1, 8, 8)
        expected = self.results(tensors, "triton")
        monkeypatch.setattr("kernels.skip_readout.gpu.op.PROGRAMS", programs)
        actual = self.results(tensors, "triton")
        assert all(torch.equal(actual[name], x) for name, x in expected.items())

    def test_deterministic_mode_computes_each_token_alone(self):
        tensors = {name: x.double() for name, x in self.inputs(*self.some_sizes).items()}
        with kernels.deterministic():
            actual = self.results(tensors, "torch")
        torch.testing.assert_close(actual, self.results(tensors, "reference"))


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_by_the_formula(backend: str):
    a = {name: x.double() for name, x in inputs(2, 3, 1, 2, 2, 4, 5).items()}
    q, k = (a[name].repeat(1, 1, 2, 1) + a[f"{name}_bias"] for name in ("q", "k"))
    own = (a["beta"] * torch.einsum("bthk,bthk->bth", q, k)).view(2, 3, 2, 2).sum(-1) + a["D"]
    with kernels.backend(backend):
        y = skip_readout(**a)
    torch.testing.assert_close(y, (a["o"] + own[..., None] * a["v"]) * F.silu(a["gate"]))


def test_heads_that_the_kernels_cannot_hold():
    tensors = inputs(1, 1, 1, 1, 1, 4097, 1)
    with (
        kernels.backend("triton"),
        pytest.raises(kernels.UserError, match="which takes heads of at most 4096 channels"),
    ):
        skip_readout(**tensors)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("o", (1, 2, 0, 4), r"o: expected a floating \[B,T,H,V\] with at least one head, got torch.float32 \(1, 2, 0"),
        ("q", (1, 2, 3, 4), r"q: shape \(1, 2, 3, 4\) does not fit 2 heads of o and 2 heads of q_bias"),
        ("k", (1, 2, 2, 4), r"k: expected \[1, 2, 1, 4\], got shape \(1, 2, 2, 4\)"),
        ("q_bias", (3, 4), r"q: shape \(1, 2, 1, 4\) does not fit 2 heads of o and 3 heads of q_bias"),
        ("q_bias", (2, 5), r"q: expected \[1, 2, 1, 5\], got shape \(1, 2, 1, 4\)"),
        ("D", (1,), r"D: expected \[2\], got shape \(1,\)"),
        ("gate", (1, 2, 8), r"gate: expected \[1, 2, 2, 4\], got shape \(1, 2, 8\)"),
    ],
)
def test_arguments_that_do_not_fit(name: str, shape: tuple[int, ...], message: str):
    with pytest.raises(ValueError, match=f"^{message}"):
        skip_readout(**inputs(1, 2, 1, 2, 1, 4, 4) | {name: torch.zeros(shape)})
