"""Keys, erase keys and decays of RWKV-7: by the formulas, and in Triton."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from kernels import erase_gates

from .op_contract import BACKENDS, DEVICE, SeveralResults, Tensors


def inputs(*shape: int) -> Tensors:
    """Keys of this shape, gates that are columns of a projection, some of them extreme, and parameters."""
    *outer, M, K = shape
    wide = 3 * torch.randn(*outer, 2 * M * K + 3)
    wide[..., 0], wide[..., -1] = 100.0, -100.0  # exponentials would overflow
    tensors = {"k": torch.randn(shape), "decay": wide[..., : M * K], "rate": wide[..., -M * K :]}
    tensors |= {name: torch.randn(M * K) for name in ("decay_bias", "rate_bias", "k_k", "k_a")}
    return {name: x.to(DEVICE) for name, x in tensors.items()}


class TestEraseGates(SeveralResults):
    op = "erase_gates"
    outputs = ("keys", "erase", "write", "log_decay")
    sizes = ((1, 1, 1), (2, 7, 3, 5), (2, 70, 2, 64))
    some_sizes = (2, 9, 2, 33)
    device_sizes = ((2, 4097, 16, 64),)
    settings = (0.6,)
    low = ("keys", "erase", "write", "k", "decay", "rate")
    tolerances = (1e-4, 2e-5)
    fitting = (2, 2, 3)
    misfits = (
        ({"k": torch.zeros(6)}, r"k: expected \[…,M,K\], got shape \(6,\)"),
        ({"rate": torch.zeros(2, 5)}, r"rate: expected \[2, 6\], got shape \(2, 5\)"),
        ({"k_a": torch.zeros(2, 3)}, r"k_a: expected \[6\], got shape \(2, 3\)"),
        ({"k": torch.zeros(2, 2, 3).long()}, "k: expected a floating dtype, got torch.int64"),
        *(
            ({"largest": largest}, f"largest: must be a finite number from 0, got {largest}")
            for largest in (-0.6, float("nan"), float("inf"))
        ),
    )

    def inputs(self, *sizes: int) -> Tensors:
        return inputs(*sizes)

    def call(self, **tensors: Any) -> tuple[Tensor, ...]:
        return erase_gates(**{"largest": 0.6, **tensors})

    def formula(self, k, decay, rate, decay_bias, rate_bias, k_k, k_a) -> tuple[Tensor, ...]:
        rate = torch.sigmoid(rate + rate_bias).view_as(k)
        direction = F.normalize(k * k_k.view(k.shape[-2:]), dim=-1)
        keys = k * (1 + (rate - 1) * k_a.view(k.shape[-2:]))
        return keys, direction, rate * direction, -0.6 * torch.sigmoid(decay + decay_bias).view_as(k)

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_keys_of_zeros_erase_nothing(self, backend: str):
        tensors = inputs(3, 2, 4) | {"k": torch.zeros(3, 2, 4, device=DEVICE)}
        actual = self.agree(tensors, backend)
        assert not actual["erase"].any()
        assert all(x.isfinite().all() for x in actual.values())


def test_gradients_that_are_rows_of_a_wider_tensor():
    a, actual = inputs(2, 5, 3, 4), []
    arriving = torch.randn(2, 5, 3, 3, 4, device=DEVICE)
    for backend in ("triton", "reference"):
        leaves = {name: x.clone().requires_grad_() for name, x in a.items()}
        with kernels.backend(backend):
            pairs = torch.stack(erase_gates(**leaves, largest=0.6)[:3], 2)
        actual.append(torch.autograd.grad(pairs, [*leaves.values()], arriving, materialize_grads=True))
    torch.testing.assert_close(*actual, atol=1e-4, rtol=1e-4)
