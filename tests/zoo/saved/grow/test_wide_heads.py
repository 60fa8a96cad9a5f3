"""Merged heads are wider than those that models are trained with; on a GPU they run as Triton kernels all the same."""

import logging

import pytest
import torch
from torch import Tensor

import kernels
from mixers import GLA, Site

# GLA-1.3B's four heads as one
SITE = Site(hidden_size=2048, num_heads=1)


def results(mixer: GLA, x: Tensor, backend: str) -> dict[str, Tensor]:
    """Outputs and all gradients."""
    x = x.clone().requires_grad_()
    mixer.zero_grad()
    with kernels.backend(backend):
        y, _ = mixer(x)
    y.square().mean().backward()
    return {"y": y, "x": x.grad, **{name: p.grad for name, p in mixer.named_parameters()}}  # type: ignore[dict-item]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-4), (torch.bfloat16, 3e-2)])
def test_one_head_of_the_merged_1_3b_model(dtype: torch.dtype, tolerance: float, caplog: pytest.LogCaptureFixture):
    mixer, x = GLA(SITE).cuda(), torch.randn(1, 150, 2048, device="cuda")
    assert (mixer.key_size, mixer.value_size) == (1024, 2048)
    expected = {name: tensor.detach().clone() for name, tensor in results(mixer, x, "reference").items()}
    with caplog.at_level(logging.WARNING):
        actual = results(mixer.to(dtype), x.to(dtype), "auto")
    for name, wanted in expected.items():
        error = (actual[name].float() - wanted).norm() / wanted.norm()
        assert error <= tolerance, f"{name}: {error:.2g}"
    assert not [record for record in caplog.records if record.name == "kernels.core.backend"], "it fell back to PyTorch"
