"""Compare a mixer with its formula in NumPy."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import kernels

from .test_parity import by_name


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def check_against_formula(
    module: nn.Module,
    formula: Callable[[np.ndarray, dict[str, np.ndarray]], np.ndarray],
    *,
    backend: str = "torch",
    outputs: tuple[float, float],
    gradients: float = 1e-3,
) -> None:
    """Compare the outputs with a formula, and the gradients of all weights with its finite differences.

    Args:
        module: A mixer of hidden size 32 in fp64.
        formula: Its outputs, given the input [B,T,D] and the weights by name.
        backend: Where the mixer runs.
        outputs: Relative and absolute tolerance of the outputs.
        gradients: Tolerance, relative and absolute, of the derivative of a loss along a random direction.
    """
    x, dy = torch.randn(2, 2, 70, 32, dtype=torch.float64).unbind()
    with kernels.backend(backend):
        y = module(x)[0]
    y.backward(dy)
    weights = {name: p.numpy() for name, p in by_name(module, lambda p: p.detach()).items()}
    relative, absolute = outputs
    np.testing.assert_allclose(y.detach().numpy(), formula(x.numpy(), weights), rtol=relative, atol=absolute)
    for name, gradient in by_name(module, lambda p: p.grad).items():
        direction = np.random.default_rng(0).standard_normal(gradient.shape)
        ends = [
            (formula(x.numpy(), {**weights, name: weights[name] + step * direction}) * dy.numpy()).sum()
            for step in (1e-5, -1e-5)
        ]
        expected = (ends[0] - ends[1]) / 2e-5
        assert (gradient.numpy() * direction).sum() == pytest.approx(expected, rel=gradients, abs=gradients), name
