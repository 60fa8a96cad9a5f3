"""The readout of Mamba-3: by the formula, in PyTorch and in Triton."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from kernels.skip_readout import own_shares, skip_readout

from .op_contract import BACKENDS, DEVICE, OpContract, Tensors


class TestSkipReadout(OpContract):
    op = "skip_readout"
    sizes = ((1, 1, 1, 1), (2, 5, 4, 8, False), (1, 17, 6, 11), (2, 35, 2, 64))
    some_sizes = (2, 9, 4, 16)
    device_sizes = ((4, 1023, 32, 64), (1, 3001, 8, 128))
    rounded_once = ("triton",)
    low = ("o", "v", "gate", "y")
    fitting = (1, 2, 2, 4)
    misfits = (
        (
            {"o": torch.zeros(1, 2, 0, 4)},
            r"o: expected a floating \[B,T,H,V\] with at least one head, got torch.float32 \(1, 2, 0",
        ),
        ({"v": torch.zeros(1, 2, 1, 4)}, r"v: expected \[1, 2, 2, 4\], got shape \(1, 2, 1, 4\)"),
        ({"own": torch.zeros(1, 2, 1)}, r"own: expected \[1, 2, 2\], got shape \(1, 2, 1\)"),
        ({"gate": torch.zeros(1, 2, 8)}, r"gate: expected \[1, 2, 2, 4\], got shape \(1, 2, 8\)"),
    )
    refused = (((1, 1, 1, 4097), "which takes heads of at most 4096 channels"),)

    def inputs(self, B: int, T: int, H: int, V: int, gated: bool = True) -> Tensors:
        """Values and gates that are columns of a projection, and other tensors without gaps."""
        tensors = {"o": 3 * torch.randn(B, T, H, V), "v": torch.randn(B, T, H * V + 3)[..., 2:-1].unflatten(-1, (H, V))}
        tensors["own"] = torch.randn(B, T, H)
        if gated:
            tensors["gate"] = torch.randn(B, T, H * V + 2)[..., 1:-1].unflatten(-1, (H, V))
        return {name: x.to(DEVICE) for name, x in tensors.items()}

    def call(self, **tensors: Tensor) -> Tensor:
        return skip_readout(**tensors)

    def formula(self, o, v, own, gate) -> Tensor:
        return (o + own[..., None] * v) * F.silu(gate)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_dtype_is_that_of_o(backend: str):
    a = TestSkipReadout().inputs(2, 3, 2, 5)
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
