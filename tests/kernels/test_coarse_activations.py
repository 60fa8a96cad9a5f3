"""Weights in fp32 beside activations in bf16, as under `bf16-true`: what is kept of a weight's digits must be used."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import kernels

from .places import PLACES

OPS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "rms_norm": lambda x, y, w, b: kernels.rms_norm(x, w),
    "add_rms_norm": lambda x, y, w, b: kernels.add_rms_norm(x, y, w)[1],
    "gated_rms_norm": lambda x, y, w, b: kernels.gated_rms_norm(x, y, w),
    "gated_rms_norm, gate first": lambda x, y, w, b: kernels.gated_rms_norm(x, y, w, gate_first=True),
    "discretise": lambda x, y, w, b: kernels.discretise(x, w, b)[0],
    "selective_scan": lambda x, y, w, b: kernels.selective_scan(x[None], -y.abs()[None], w[:, None])[0],
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("backend", ["torch", "reference", "triton"])
@pytest.mark.parametrize("device", PLACES)
def test_forward_and_backward_are_those_of_fp32_up_to_rounding(device: str, backend: str, op: str):
    if backend == "triton":
        pytest.importorskip("triton")
    made = torch.Generator().manual_seed(0)
    x, y = (torch.randn(5, 16, generator=made).bfloat16().to(device) for _ in range(2))
    w, b = (torch.rand(16, generator=made).to(device) for _ in range(2))
    actual = []
    for kind in (torch.bfloat16, torch.float32):
        leaves = [z.detach().to(kind).clone().requires_grad_() for z in (x, y)]
        fine = [z.clone().requires_grad_() for z in (w, b)]
        with kernels.backend(backend):
            out = OPS[op](*leaves, *fine)
        out.float().square().sum().backward()
        assert out.dtype == (torch.float32 if op == "discretise" else kind)
        gradients = [z.grad for z in (*leaves, *fine) if z.grad is not None]
        assert all(z.grad is None or z.grad.dtype == z.dtype for z in (*leaves, *fine))
        actual.append([out, *gradients])
    assert len(actual[0]) == len(actual[1]) >= 3
    for low, high in zip(*actual, strict=True):
        assert (low.float() - high).norm() < 0.02 * high.norm()
