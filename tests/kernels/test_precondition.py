"""Preconditioned keys: by the formula, with gradients from the arguments alone."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.precondition import precondition

from .op_contract import DEVICE, OpContract, Tensors, interpreted

LIMIT = 1.7


class TestPrecondition(OpContract):
    op = "precondition_triton"
    sizes = ((1, 1, 1, 1), (2, 7, 3, 5), (1, 40, 5, 120), (1, 700, 6, 40))
    some_sizes = (2, 7, 3, 5)
    device_sizes = ((4, 500, 16, 128), (2, 77, 3, 40))
    settings = (LIMIT,)
    low = ("k", "curvature", "y")
    exact = torch.float64
    tolerances = (2e-5, 2e-5)
    rounded_once = ()
    interpreted_only = True
    low_norms = (2e-2, 2e-2)
    fitting = (1, 3, 2, 4)
    misfits = (
        ({"k": torch.zeros(2, 3)}, r"k: expected a floating \[B,T,H,K\], got torch.float32 \(2, 3\)$"),
        ({"curvature": torch.zeros(1, 3, 2, 5)}, r"curvature: expected shape \(1, 3, 2, 4\), got \(1, 3, 2, 5\)$"),
        ({"beta": torch.zeros(3, 2)}, r"beta: expected shape \(1, 3, 2\), got \(3, 2\)$"),
        ({"centre": torch.zeros(3)}, r"centre: expected shape \(2,\), got \(3,\)$"),
        ({"curvature": torch.full((1, 3, 2, 4), -0.5)}, r"curvature: must be ≥ 0, got -0.5$"),
        ({"limit": 1.0}, r"limit: must be a finite number above 1, got 1.0$"),
        ({"limit": float("inf")}, r"limit: must be a finite number above 1, got inf$"),
    )

    def inputs(self, *shape: int) -> Tensors:
        """Keys with curvatures from 0 to 10, one of them far from its centre."""
        curvature = 10 * torch.rand(shape) ** 6
        curvature[..., 0] = 0
        curvature += 1e-2 * (shape in self.device_sizes)
        tensors = {"k": torch.randn(shape), "curvature": curvature, "beta": 2 * torch.rand(shape[:3])}
        return {name: x.to(DEVICE) for name, x in {**tensors, "centre": torch.randn(shape[2]) - 1}.items()}

    def call(self, **tensors: Any) -> Tensor:
        return precondition(**{"limit": LIMIT, **tensors})

    @interpreted
    def test_parts_of_larger_tensors(self):
        wide = self.inputs(2, 9, 4, 12)
        self.agree({name: x[1:3] if name == "centre" else x[:, 2:5, 1:3] for name, x in wide.items()}, "triton")


def test_the_factor_lies_between_its_limits():
    curvature = torch.tensor([0.0, 1e-9, 0.3, 1e9]).view(1, 1, 1, 4)
    ones, centre = torch.ones(1, 1, 1, 4), torch.tensor([0.3]).log()
    factor = precondition(ones, curvature, ones[..., 0], centre, limit=2.0).flatten()
    assert ((factor > 0.5) & (factor < 2)).all()
    assert factor[2].item() == pytest.approx(1, abs=1e-5)
    assert factor.tolist() == sorted(factor.tolist(), reverse=True)


def test_gradients_by_differences():
    a = [x.double().requires_grad_() for x in TestPrecondition().inputs(1, 3, 2, 4).values()]
    a[1] = (a[1].detach() + 0.1).requires_grad_()
    assert torch.autograd.gradcheck(lambda *tensors: precondition(*tensors, limit=LIMIT), a)
