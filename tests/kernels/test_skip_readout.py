"""The readout of Mamba-3: by the formula, in PyTorch and in Triton."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from kernels.skip_readout import own_shares, skip_readout

from .op_contract import BACKENDS, DEVICE, OpContract, Tensors


def inputs(B: int, T: int, H: int, V: int, gated: bool = True) -> Tensors:
    """Values and gates that are columns of a projection, and other tensors without gaps."""
    tensors = {"o": 3 * torch.randn(B, T, H, V), "v": torch.randn(B, T, H * V + 3)[..., 2:-1].unflatten(-1, (H, V))}
    tensors["own"] = torch.randn(B, T, H)
    if gated:
        tensors["gate"] = torch.randn(B, T, H * V + 2)[..., 1:-1].unflatten(-1, (H, V))
    return {name: x.to(DEVICE) for name, x in tensors.items()}


class TestSkipReadout(OpContract):
    op = "skip_readout"
    sizes = ((1, 1, 1, 1), (2, 5, 4, 8, False), (1, 17, 6, 11), (2, 35, 2, 64))
    some_sizes = (2, 9, 4, 16)
    device_sizes = ((4, 1023, 32, 64), (1, 3001, 8, 128))
    rounded_once = ("triton",)
    low = ("o", "v", "gate", "y")

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


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_by_the_formula(backend: str):
    a = {name: x.double() for name, x in inputs(2, 3, 2, 5).items()}
    with kernels.backend(backend):
        y = skip_readout(**a)
    torch.testing.assert_close(y, (a["o"] + a["own"][..., None] * a["v"]) * F.silu(a["gate"]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_dtype_is_that_of_o(backend: str):
    a = inputs(2, 3, 2, 5)
    with kernels.backend(backend):
        assert skip_readout(**a | {"o": a["o"].bfloat16()}).dtype == torch.bfloat16


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("G", "H", "E"), [(1, 1, 1), (2, 6, 1), (1, 2, 3), (2, 4, 2)])
def test_shares_by_the_formula(G: int, H: int, E: int, deterministic: bool):
    q, k, beta = torch.randn(2, 3, G * E, 5).double(), torch.randn(2, 3, G * E, 5).double(), torch.rand(2, 3, H * E)
    q_bias, k_bias, D = torch.randn(H * E, 5), torch.randn(H * E, 5), torch.randn(H)
    of_heads = [x.unflatten(2, (G, 1, E)).expand(2, 3, G, H // G, E, 5).flatten(2, 4) for x in (q, k)]
    scores = ((of_heads[0] + q_bias) * (of_heads[1] + k_bias)).sum(-1)
    with kernels.deterministic(deterministic):
        own = own_shares(q, k, beta, q_bias=q_bias.double(), k_bias=k_bias.double(), D=D.double())
    torch.testing.assert_close(own, (beta * scores).view(2, 3, H, E).sum(-1) + D)


def test_heads_that_the_kernels_cannot_hold():
    with (
        kernels.backend("triton"),
        pytest.raises(kernels.UserError, match="which takes heads of at most 4096 channels"),
    ):
        skip_readout(**inputs(1, 1, 1, 4097))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("o", (1, 2, 0, 4), r"o: expected a floating \[B,T,H,V\] with at least one head, got torch.float32 \(1, 2, 0"),
        ("v", (1, 2, 1, 4), r"v: expected \[1, 2, 2, 4\], got shape \(1, 2, 1, 4\)"),
        ("own", (1, 2, 1), r"own: expected \[1, 2, 2\], got shape \(1, 2, 1\)"),
        ("gate", (1, 2, 8), r"gate: expected \[1, 2, 2, 4\], got shape \(1, 2, 8\)"),
    ],
)
def test_arguments_that_do_not_fit(name: str, shape: tuple[int, ...], message: str):
    with pytest.raises(ValueError, match=f"^{message}"):
        skip_readout(**inputs(1, 2, 2, 4) | {name: torch.zeros(shape)})
