"""Where tests of kernels run, and comparisons of an op's results, each of which has a name."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# what is small and quick there would be a compilation each on a device
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")


def assert_near(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 1e-5) -> None:
    """Compare each result relative to its norm."""
    for name, x in expected.items():
        assert actual[name].shape == x.shape, name
        error, norm = float((actual[name].double() - x.double()).norm()), float(x.double().norm())
        assert error <= tolerance * norm, f"{name}: error {error:.2g} at norm {norm:.2g}"


def assert_repeats(run: Callable[[], Mapping[str, Tensor]], times: int = 20) -> None:
    """Compare the bits of several runs. There are no atomics: a difference would be a race."""
    expected = run()
    for _ in range(times):
        actual = run()
        assert all(torch.equal(actual[name], x) for name, x in expected.items())
