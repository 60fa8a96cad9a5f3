"""Preconditioned keys: by the formula, with gradients from the arguments alone."""

from functools import partial

import pytest
import torch
from torch import Tensor

import kernels
from kernels.precondition import precondition

from .comparisons import assert_near, assert_repeats, interpreted

LIMIT = 1.7


def filled(result: Tensor | tuple[Tensor]) -> Tensor | tuple[Tensor]:
    for x in (result,) if isinstance(result, Tensor) else result:
        x.fill_(torch.nan)
    return result


def inputs(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> dict[str, Tensor]:
    """Keys with curvatures from 0 to 10, one of them far from its centre."""
    curvature = 10 * torch.rand(shape) ** 6
    curvature[..., 0] = 0
    tensors = {"k": torch.randn(shape).to(dtype), "curvature": curvature.to(dtype), "beta": 2 * torch.rand(shape[:3])}
    return {name: x.to(device) for name, x in {**tensors, "centre": torch.randn(shape[2]) - 1}.items()}


def results(a: dict[str, Tensor], backend: str) -> dict[str, Tensor]:
    """The keys and all gradients."""
    leaves = {name: x.detach().requires_grad_() for name, x in a.items()}
    with kernels.backend(backend):
        y = precondition(**leaves, limit=LIMIT)
    arriving = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).to(y)
    return {"y": y.detach(), **dict(zip(a, torch.autograd.grad(y, list(leaves.values()), arriving), strict=True))}


def agree(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    for name, x in actual.items():
        assert x.dtype == (torch.float32 if name in ("beta", "centre") else actual["y"].dtype)
        torch.testing.assert_close(x.double(), expected[name].double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=interpreted)])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 7, 3, 5), (1, 40, 5, 120), (1, 700, 6, 40)])
def test_by_the_formula(backend: str, shape: tuple[int, ...], poison: None):
    a = inputs(*shape)
    agree(results(a, backend), results({name: x.double() for name, x in a.items()}, "reference"), 2e-5)


def test_the_factor_lies_between_its_limits():
    curvature = torch.tensor([0.0, 1e-9, 0.3, 1e9]).view(1, 1, 1, 4)
    ones, centre = torch.ones(1, 1, 1, 4), torch.tensor([0.3]).log()
    factor = precondition(ones, curvature, ones[..., 0], centre, limit=2.0).flatten()
    assert ((factor > 0.5) & (factor < 2)).all()
    assert factor[2].item() == pytest.approx(1, abs=1e-5)
    assert factor.tolist() == sorted(factor.tolist(), reverse=True)


def test_gradients_by_differences():
    a = [x.double().requires_grad_() for x in inputs(1, 3, 2, 4).values()]
    a[1] = (a[1].detach() + 0.1).requires_grad_()
    assert torch.autograd.gradcheck(lambda *tensors: precondition(*tensors, limit=LIMIT), a)


@interpreted
def test_triton_takes_parts_of_larger_tensors(poison: None):
    wide = inputs(2, 9, 4, 12)
    parts = {name: x[1:3] if name == "centre" else x[:, 2:5, 1:3] for name, x in wide.items()}
    agree(results(parts, "triton"), results(parts, "torch"), 2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("shape", [(4, 500, 16, 128), (2, 77, 3, 40)])
def test_on_a_device(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float):
    a = inputs(*shape, dtype=dtype, device="cuda")
    a["curvature"] += 1e-2
    assert_near(results(a, "triton"), results({name: x.double() for name, x in a.items()}, "torch"), tolerance)
    assert_repeats(partial(results, a, "triton"), 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": torch.zeros(2, 3)}, r"^k: expected a floating \[B,T,H,K\], got torch.float32 \(2, 3\)$"),
        ({"curvature": torch.zeros(1, 3, 2, 5)}, r"^curvature: expected shape \(1, 3, 2, 4\), got \(1, 3, 2, 5\)$"),
        ({"beta": torch.zeros(3, 2)}, r"^beta: expected shape \(1, 3, 2\), got \(3, 2\)$"),
        ({"centre": torch.zeros(3)}, r"^centre: expected shape \(2,\), got \(3,\)$"),
        ({"curvature": torch.full((1, 3, 2, 4), -0.5)}, r"^curvature: must be ≥ 0, got -0.5$"),
        ({"limit": 1.0}, r"^limit: must be a finite number above 1, got 1.0$"),
        ({"limit": float("inf")}, r"^limit: must be a finite number above 1, got inf$"),
    ],
)
def test_arguments_that_do_not_fit(changes: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        precondition(**{**inputs(1, 3, 2, 4), "limit": LIMIT, **changes})
