"""Norms of gradients and clipping, of one dtype and of several."""

import pytest
import torch
from torch import nn

from zoo.train.clipping import clip, total_norm


def parameters(*dtypes: torch.dtype) -> list[nn.Parameter]:
    """Matrices with gradients, and one without."""
    made = [nn.Parameter(torch.randn(20, 30).to(dtype)) for dtype in dtypes]
    for parameter in made:
        parameter.grad = torch.randn(20, 30).to(parameter.dtype)
    return [*made, nn.Parameter(torch.ones(3))]


def gradients(of: list[nn.Parameter]) -> list[torch.Tensor]:
    return [p.grad for p in of if p.grad is not None]


def exact_norm(of: list[nn.Parameter]) -> float:
    return float(torch.cat([g.double().flatten() for g in gradients(of)]).norm())


def test_one_dtype_is_what_pytorch_does():
    ours, theirs = (parameters(torch.float32, torch.float32) for _ in range(2))
    for one, other in zip(gradients(ours), gradients(theirs), strict=True):
        other.copy_(one)
    norm = total_norm(gradients(ours))
    assert torch.equal(norm, nn.utils.clip_grad_norm_(theirs, 0.5))
    clip(ours, 0.5, norm)
    assert all(torch.equal(one, other) for one, other in zip(gradients(ours), gradients(theirs), strict=True))


@pytest.mark.parametrize("most", [0.5, 1e3])
def test_two_dtypes_have_one_norm_and_one_factor(most: float):
    given = parameters(torch.bfloat16, torch.float32, torch.bfloat16)
    before, norm = [g.double() for g in gradients(given)], exact_norm(given)
    found = total_norm(gradients(given))
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(norm, rel=5e-3)
    clip(given, most, found)
    assert exact_norm(given) == pytest.approx(min(norm, most), rel=1e-2)
    for one, other in zip(before, gradients(given), strict=True):
        torch.testing.assert_close(other.double(), one * min(1, most / norm), rtol=2e-2, atol=0)


def test_without_gradients_there_is_nothing_to_clip():
    given = [nn.Parameter(torch.ones(3))]
    assert total_norm(gradients(given)) == 0
    clip(given, 1.0, torch.tensor(0.0))
