"""Tensors repeated along axes, and the order of the sums in their gradients."""

import pytest
import torch

import kernels
from kernels.core.expansion import expanded


@pytest.mark.parametrize("shape", [(3, 5, 7), (3, 1, 64), (3, 33, 1)])
def test_values_and_gradients(shape: tuple[int, ...]):
    x = torch.randn(3, 1, 1, dtype=torch.float64, requires_grad=True)
    arriving = torch.randn(shape, dtype=torch.float64)
    results = []
    for mode in (False, True):
        with kernels.deterministic(mode):
            y = expanded(x, shape)
            assert torch.equal(y, x.expand(shape))
            results.append(torch.autograd.grad(y, x, arriving)[0])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_gradient_of_a_row_is_that_of_the_row_alone(device: str):
    x = torch.randn(64, 1, 1, device=device, requires_grad=True)
    arriving = torch.randn(64, 128, 65, device=device)
    with kernels.deterministic():
        (together,) = torch.autograd.grad(expanded(x, (64, 128, 65)), x, arriving)
        for row in (0, 63):
            alone = x[row : row + 1].detach().requires_grad_()
            (gradient,) = torch.autograd.grad(expanded(alone, (1, 128, 65)), alone, arriving[row : row + 1])
            assert torch.equal(gradient[0], together[row])
