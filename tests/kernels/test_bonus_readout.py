"""The readout of RWKV-7: by the formula, and in Triton."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from kernels import bonus_readout

from .op_contract import DEVICE, OpContract, Tensors


def inputs(B: int, T: int, H: int, E: int, K: int, V: int) -> Tensors:
    """Values that are columns of a projection, and other tensors without gaps."""
    tensors = {"o": 3 * torch.randn(B, T, H, V) + 1, "q": torch.randn(B, T, H * E, K)}
    tensors |= {"k": torch.randn(B, T, H * E, K), "v": torch.randn(B, T, H * V + 3)[..., 2:-1].unflatten(-1, (H, V))}
    tensors |= {"gate": torch.rand(B, T, H * V), "r_k": torch.randn(H * E * K)}
    tensors |= {"weight": torch.randn(H, V), "bias": torch.randn(H, V)}
    return {name: x.to(DEVICE) for name, x in tensors.items()}


class TestBonusReadout(OpContract):
    op = "bonus_readout"
    sizes = ((1, 1, 1, 1, 1, 1), (2, 5, 2, 1, 8, 8), (1, 7, 3, 2, 5, 11), (2, 70, 2, 1, 64, 64))
    some_sizes = (2, 9, 2, 1, 33, 16)
    device_sizes = ((2, 4097, 16, 1, 64, 64),)
    low = ("o", "q", "k", "v", "gate", "y")

    def inputs(self, *sizes: int) -> Tensors:
        return inputs(*sizes)

    def call(self, **tensors: Tensor) -> Tensor:
        return bonus_readout(**tensors, eps=1e-3)

    def registered(self, tensors: Tensors) -> Iterable[tuple[Any, ...]]:
        yield *tensors.values(), 1e-3, False


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_by_the_formula(backend: str):
    a = {name: x.double() for name, x in inputs(2, 3, 2, 2, 4, 5).items()}
    norm = F.group_norm(a["o"].flatten(0, 1).flatten(1), 2, a["weight"].flatten(), a["bias"].flatten(), 1e-3)
    own = (a["q"] * a["k"] * a["r_k"].view(4, 4)).sum(-1).view(2, 3, 2, 2).sum(-1, keepdim=True) * a["v"]
    with kernels.backend(backend):
        y = bonus_readout(**a, eps=1e-3)
    torch.testing.assert_close(y, (norm.view(2, 3, 10) + own.flatten(2)) * a["gate"])


def test_heads_that_the_kernels_cannot_hold():
    tensors = inputs(1, 1, 1, 1, 4097, 1)
    with (
        kernels.backend("triton"),
        pytest.raises(kernels.UserError, match="which takes heads of at most 4096 channels"),
    ):
        bonus_readout(**tensors)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("q", (1, 2, 3, 4), r"q: expected \[…,H·E,K\] for o \[…,H,V\] of \(1, 2, 2, 4\), got shape \(1, 2, 3, 4\)"),
        ("k", (1, 2, 2, 5), r"k: expected \[1, 2, 2, 4\], got shape \(1, 2, 2, 5\)"),
        ("gate", (1, 2, 2, 4), r"gate: expected \[1, 2, 8\], got shape \(1, 2, 2, 4\)"),
        ("bias", (8,), r"bias: expected \[2, 4\], got shape \(8,\)"),
    ],
)
def test_arguments_that_do_not_fit(name: str, shape: tuple[int, ...], message: str):
    with pytest.raises(ValueError, match=f"^{message}"):
        bonus_readout(**inputs(1, 2, 2, 1, 4, 4) | {name: torch.zeros(shape)})


@pytest.mark.parametrize("o", [torch.zeros(1, 2, 0, 4), torch.zeros(1, 2, 2, 4, dtype=torch.int64)])
def test_outputs_without_heads_or_in_integers(o: Tensor):
    with pytest.raises(ValueError, match=r"^o: expected a floating \[…,H,V\] with at least one head, got torch"):
        bonus_readout(**inputs(1, 2, 2, 1, 4, 4) | {"o": o})
