"""Tests that every op on single tokens must pass: against its loop, in half precision, repeated, and on a device."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels

from .comparisons import DEVICE as DEVICE
from .comparisons import interpreted as interpreted

BACKENDS = ("torch", "triton")
Tensors = dict[str, Tensor]


@pytest.mark.usefixtures("poison")
class OpContract:
    """The contract of an op. A subclass in the op's test file, with a name that begins with `Test`, describes the op.

    Attributes:
        op: The name of the op's first registered function.
        outputs: Names of the results.
        sizes: Sizes to compare the backends at, each the arguments of `inputs`.
        some_sizes: Sizes for the tests that need one example.
        device_sizes: Sizes as in training.
        low: The tensors, results among them, that are in half precision where activations are.
        tolerances: Largest errors of each number in fp32, relative and absolute.
        low_tolerances: The same in half precision.
        rounded_once: The backends that round no intermediate result to half precision.
        device_tolerance: Largest relative error of a norm on a device in fp32.
    """

    op: str
    outputs: Sequence[str] = ("y",)
    sizes: Sequence[tuple[Any, ...]]
    some_sizes: tuple[Any, ...]
    device_sizes: Sequence[tuple[Any, ...]]
    low: Collection[str]
    tolerances: tuple[float, float] = (1e-4, 1e-4)
    low_tolerances: tuple[float, float] = (1e-2, 1e-4)
    rounded_once: Collection[str] = BACKENDS
    device_tolerance: float = 1e-4

    def inputs(self, *sizes: Any) -> Tensors:
        """Random arguments in fp32 on the device."""
        raise NotImplementedError

    def call(self, **tensors: Any) -> Any:
        """Call the op."""
        raise NotImplementedError

    def registered(self, tensors: Tensors) -> Iterable[tuple[Any, ...]]:
        """Return the arguments of calls of the registered function."""
        raise NotImplementedError

    def rounded(self, tensors: Tensors, dtype: torch.dtype = torch.bfloat16) -> Tensors:
        """The tensors as they are where activations have this dtype."""
        return {name: x.to(dtype) if name in self.low else x for name, x in tensors.items()}

    def results(self, tensors: Tensors, backend: str, through: Sequence[str] | None = None, **options: Any) -> Tensors:
        """All results, and all gradients through some of them."""
        leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
        with kernels.backend(backend):
            y = self.call(**leaves, **options)
        named = dict(zip(self.outputs, (y,) if isinstance(y, Tensor) else y, strict=True))
        generator = torch.Generator().manual_seed(0)
        arriving = {name: torch.randn(x.shape, generator=generator).bfloat16().to(x) for name, x in named.items()}
        reached = through or self.outputs
        gradients = torch.autograd.grad(
            [named[name] for name in reached],
            list(leaves.values()),
            [arriving[name] for name in reached],
            materialize_grads=True,
        )
        detached = {name: x.detach() for name, x in named.items()}
        return detached | {f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}

    def close(self, actual: Tensors, expected: Tensors) -> None:
        """Compare results in fp32."""
        relative, absolute = self.tolerances
        torch.testing.assert_close(actual, expected, rtol=relative, atol=absolute)
        for name, x in expected.items():
            assert (actual[name] - x).norm() <= 1e-5 * x.norm(), name

    def agree(self, tensors: Tensors, backend: str, **options: Any) -> Tensors:
        """Return the results after a comparison with the loop."""
        actual = self.results(tensors, backend, **options)
        self.close(actual, self.results(tensors, "reference", **options))
        return actual

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        for name, values in (("sizes", self.sizes), ("device_sizes", self.device_sizes), ("through", self.outputs)):
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, values, ids=str)

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_outputs_and_gradients(self, sizes: tuple[Any, ...], backend: str):
        self.agree(self.inputs(*sizes), backend)

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_half_precision(self, backend: str):
        tensors = self.rounded(self.inputs(*self.some_sizes))
        exact = self.results({name: x.float() for name, x in tensors.items()}, "reference")
        actual = self.results(tensors, backend)
        low = {f"d{name}" if name in tensors else name for name in self.low}
        relative, absolute = self.low_tolerances
        assert {name for name, x in actual.items() if x.dtype == torch.bfloat16} == low
        for name, x in actual.items():
            assert (x - exact[name]).norm() <= 1e-2 * exact[name].norm(), name
            if backend in self.rounded_once:
                torch.testing.assert_close(x.float(), exact[name], rtol=relative, atol=absolute)

    @pytest.mark.slow
    def test_the_op_is_registered_properly(self):
        tensors = self.inputs(*self.some_sizes)
        self.results(tensors, "triton")
        for arguments in self.registered({name: x.clone().requires_grad_() for name, x in tensors.items()}):
            torch.library.opcheck(getattr(torch.ops.token_mixer_zoo, self.op), arguments)

    @pytest.mark.gpu
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_on_device(self, device_sizes: tuple[Any, ...], dtype: torch.dtype):
        tensors = self.rounded(self.inputs(*device_sizes), dtype)
        first, second = self.results(tensors, "triton"), self.results(tensors, "triton")
        exact = self.results({name: x.double() for name, x in tensors.items()}, "torch")
        tolerance = 1e-2 if dtype == torch.bfloat16 else self.device_tolerance
        for name, x in first.items():
            assert torch.equal(second[name], x), name
            assert (x - exact[name]).norm() <= tolerance * exact[name].norm(), name


class SeveralResults(OpContract):
    """The contract of an op with several results, not all of which need to reach a loss."""

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_gradients_through_one_result(self, sizes: tuple[Any, ...], through: str, backend: str):
        self.agree(self.inputs(*sizes), backend, through=(through,))
