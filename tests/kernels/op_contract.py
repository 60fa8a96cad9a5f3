"""Tests that every op on single tokens must pass: against its loop, in half precision, repeated, and on a device."""

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels

from .comparisons import DEVICE as DEVICE
from .comparisons import assert_repeats
from .comparisons import interpreted as interpreted

BACKENDS = ("torch", "triton")
Tensors = dict[str, Tensor]


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in another dtype, in the same layout: a part of a larger tensor stays one."""
    memory = x.new_empty(0).set_(x.untyped_storage()).to(dtype)
    return memory.as_strided(x.shape, x.stride(), x.storage_offset())


@pytest.mark.usefixtures("poison")
class OpContract:
    """The contract of an op. A subclass in the op's test file, with a name that begins with `Test`, describes the op.

    Attributes:
        op: The name of the op's first registered function.
        outputs: Names of the results.
        sizes: Sizes to compare the backends at, each the arguments of `inputs`.
        some_sizes: Sizes for the tests that need one example.
        device_sizes: Sizes as in training.
        low_sizes: Sizes to compare half precision at; by default `some_sizes`.
        formula_sizes: Sizes to compare the formula at; by default `some_sizes`.
        low: The tensors, results among them, that are in half precision where activations are.
        tolerances: Largest errors of each number in fp32, relative and absolute.
        low_tolerances: The same in half precision.
        halves: The dtypes of half precision.
        rounded_once: The backends that round no intermediate result to half precision.
        exact: What the loop computes in, where the others compute in fp32.
        norm_tolerance: Largest error of a result in fp32, relative to its norm.
        device_tolerance: Largest relative error of a norm on a device in fp32.
        low_norms: Largest relative errors of the norms of outputs and of gradients in half precision.
        settings: Arguments of the registered function after the tensors, other than the mode.
        interpreted_only: Whether small sizes are for the interpreter, as tolerances on a device are larger.
        repeats: Repetitions on a device, each with the same bits.
        fitting: Sizes that the arguments of `misfits` do not fit.
        misfits: Arguments that do not fit, and the beginning of the message.
        refused: Sizes that the Triton kernels do not take, and the reason.
    """

    op: str
    outputs: Sequence[str] = ("y",)
    sizes: Sequence[tuple[Any, ...]]
    some_sizes: tuple[Any, ...]
    device_sizes: Sequence[tuple[Any, ...]]
    low_sizes: Sequence[tuple[Any, ...]] = ()
    formula_sizes: Sequence[tuple[Any, ...]] = ()
    low: Collection[str]
    tolerances: tuple[float, float] = (1e-4, 1e-4)
    low_tolerances: tuple[float, float] = (1e-2, 1e-4)
    halves: Sequence[torch.dtype] = (torch.bfloat16,)
    rounded_once: Collection[str] = BACKENDS
    exact: torch.dtype = torch.float32
    norm_tolerance: float = 1e-5
    device_tolerance: float = 1e-4
    low_norms: tuple[float, float] = (1e-2, 1e-2)
    settings: tuple[Any, ...] = ()
    interpreted_only: bool = False
    repeats: int = 1
    fitting: tuple[Any, ...] = ()
    misfits: Sequence[tuple[dict[str, Any], str]] = ()
    refused: Sequence[tuple[tuple[Any, ...], str]] = ()

    def __init_subclass__(cls) -> None:
        """Collect no test of what an op does not have."""
        has = {
            "test_by_the_formula": cls.formula is not OpContract.formula,
            "test_arguments_that_do_not_fit": cls.misfits,
            "test_what_the_kernels_cannot_take": cls.refused,
        }
        for name, cases in has.items():
            setattr(cls, name, getattr(OpContract, name) if cases else None)

    def inputs(self, *sizes: Any) -> Tensors:
        """Random arguments in fp32 on the device."""
        raise NotImplementedError

    def call(self, **tensors: Any) -> Any:
        """Call the op."""
        raise NotImplementedError

    def formula(self, **tensors: Any) -> Any:
        """The results in plain PyTorch."""
        raise NotImplementedError

    def registered(self, tensors: Tensors) -> Iterable[tuple[Any, ...]]:
        """Return the arguments of calls of the registered function."""
        yield *tensors.values(), *self.settings, False

    def rounded(self, tensors: Tensors, dtype: torch.dtype = torch.bfloat16) -> Tensors:
        """The tensors as they are where activations have this dtype."""
        return {name: cast(x, dtype) if name in self.low else x for name, x in tensors.items()}

    def results(self, tensors: Tensors, backend: str, through: Sequence[str] | None = None, **options: Any) -> Tensors:
        """All results, and all gradients through some of them."""
        leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
        with kernels.backend(backend):
            y = self.call(**leaves, **options)
        named = dict(zip(self.outputs, (y,) if isinstance(y, Tensor) else y, strict=True))
        generator = torch.Generator().manual_seed(3)  # inputs may be the first numbers of seed 0
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
            assert (actual[name] - x).norm() <= self.norm_tolerance * x.norm(), name

    def agree(self, tensors: Tensors, backend: str, **options: Any) -> Tensors:
        """Return the results after a comparison with the loop."""
        if self.interpreted_only and DEVICE == "cuda":
            pytest.skip("for the interpreter")
        actual = self.results(tensors, backend, **options)
        exact = self.results({name: x.to(self.exact) for name, x in tensors.items()}, "reference", **options)
        self.close(actual, {name: x.to(actual[name].dtype) for name, x in exact.items()})
        return actual

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        axes = {name: getattr(self, name) for name in ("sizes", "device_sizes", "misfits", "refused")}
        axes |= {"through": self.outputs, "half": self.halves}
        axes |= {name: getattr(self, name) or [self.some_sizes] for name in ("low_sizes", "formula_sizes")}
        for name, values in axes.items():
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, values, ids=None if name == "misfits" else str)

    @pytest.mark.parametrize("backend", ["torch", "reference"])
    def test_by_the_formula(self, formula_sizes: tuple[Any, ...], backend: str):
        tensors = {name: x.double() for name, x in self.inputs(*formula_sizes).items()}
        with kernels.backend(backend):
            y = self.call(**tensors)
        torch.testing.assert_close(y, self.formula(**tensors))

    def test_arguments_that_do_not_fit(self, misfits: tuple[dict[str, Any], str]):
        change, message = misfits
        with pytest.raises(ValueError, match=f"^{message}"):
            self.call(**{name: x.cpu() for name, x in self.inputs(*self.fitting).items()} | change)

    def test_what_the_kernels_cannot_take(self, refused: tuple[tuple[Any, ...], str]):
        sizes, reason = refused
        tensors = self.inputs(*sizes)
        with kernels.backend("torch"):
            self.call(**tensors)
        with kernels.backend("triton"), pytest.raises(kernels.UserError, match=reason):
            self.call(**tensors)

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_recomputed_results_have_the_same_gradients(self, backend: str):
        tensors, gradients = self.inputs(*self.some_sizes), []
        for recompute in (False, True):
            leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
            with kernels.backend(backend), kernels.recomputing(recompute):
                results = self.call(**leaves)
                # squares save the results
                loss = sum(y.pow(2).sum() for y in ([results] if isinstance(results, Tensor) else results))
            gradients.append(torch.autograd.grad(loss, [*leaves.values()]))
        assert all(map(torch.equal, *gradients))

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_outputs_and_gradients(self, sizes: tuple[Any, ...], backend: str):
        self.agree(self.inputs(*sizes), backend)

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_half_precision(self, low_sizes: tuple[Any, ...], half: torch.dtype, backend: str):
        if self.interpreted_only and DEVICE == "cuda":
            pytest.skip("for the interpreter")
        tensors = self.rounded(self.inputs(*low_sizes), half)
        exact = self.results({name: x.float() for name, x in tensors.items()}, "reference")
        actual = self.results(tensors, backend)
        low = {f"d{name}" for name in self.low if name in tensors} | ({*self.low} & {*self.outputs})
        relative, absolute = self.low_tolerances
        assert {name for name, x in actual.items() if x.dtype == half} == low
        for name, x in actual.items():
            allowed = self.low_norms[name not in self.outputs]
            assert (x - exact[name]).norm() <= allowed * exact[name].norm(), name
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
        run = partial(self.results, tensors, "triton")
        actual, exact = run(), self.results({name: x.double() for name, x in tensors.items()}, "torch")
        for name, x in actual.items():
            low = self.low_norms[name not in self.outputs]
            tolerance = low if dtype == torch.bfloat16 else self.device_tolerance
            assert (x - exact[name]).norm() <= tolerance * exact[name].norm(), name
        assert_repeats(run, self.repeats)


class SeveralResults(OpContract):
    """The contract of an op with several results, not all of which need to reach a loss."""

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_gradients_through_one_result(self, sizes: tuple[Any, ...], through: str, backend: str):
        self.agree(self.inputs(*sizes), backend, through=(through,))
