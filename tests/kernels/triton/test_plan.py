"""Launches that differ in anything that a kernel is compiled for are never taken for each other."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from kernels.delta_rule.triton_plan import DeltaRule
from kernels.documents import documents
from kernels.linear_recurrence.triton_plan import LinearRecurrence
from kernels.selective_scan.triton_plan import SelectiveScan
from kernels.triton.enqueue import Prepared
from kernels.triton.launch_file import launch_file
from kernels.triton.plan import Plan, prepared

PLANS = (LinearRecurrence, DeltaRule, SelectiveScan)


@triton.jit
def add(x, y, out, ONE: tl.constexpr, TWO: tl.constexpr):
    at = tl.arange(0, 16)
    z = tl.load(x + at)
    if y is not None:
        z += tl.load(y + at)
    tl.store(out + at, z + ONE + 10 * TWO)


class Sum(Plan):
    """Adds two numbers."""

    def __init__(self, packed: Any, one: int, dtype: torch.dtype, device: torch.device):
        super().__init__(packed, dtype, device)
        self.one, self.length = one, None if packed is None else packed.bounds[-1]

    @prepared
    def add(self, two: int) -> Prepared:
        """x + y + one + 10 two."""
        return Prepared(add, (1,), ONE=self.one, TWO=two, checked=True)


def made(one: int, cu_seqlens: torch.Tensor | None = None) -> Sum:
    return Sum.of(cu_seqlens, 16, one, torch.float32, torch.device("cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")
def test_every_argument_is_part_of_what_a_launch_is_remembered_by():
    x, out = torch.arange(16.0), torch.empty(16)
    for _ in range(2):
        for one in (0, 1):
            for two in (0, 1):
                for y in (None, x):  # which tensors are missing, a launch sees for itself
                    made(one).add(two)(x, y, out)
                    assert torch.equal(out, x * (1 if y is None else 2) + one + 10 * two)


def test_what_is_alike_is_made_once():
    assert made(1) is made(1)
    assert made(1).add(2) is made(1).add(2)
    assert made(1) is not made(2)
    assert made(1).add(2) is not made(1).add(3)
    with launch_file("another.json"):
        other = made(1)
    assert other is not made(1)


def test_packed_documents_keep_their_plans():
    here, there = torch.tensor([0, 3, 16]), torch.tensor([0, 3, 16])
    assert made(1, here) is made(1, here)
    assert made(1, here) is not made(1, there)
    assert made(1, here).length == 16
    assert made(1, here).packed is documents(here, 16)


@pytest.mark.parametrize("plan", PLANS)
def test_launches_are_made_of_a_plan_and_their_arguments_alone(plan: type[Plan]):
    """No default, which the key would lack, and nothing from an enclosing function."""
    launches: list[Callable] = [f for f in vars(plan).values() if hasattr(f, "__wrapped__")]
    assert launches
    for launch in launches:
        make = launch.__wrapped__
        assert make.__closure__ is None
        kinds = {(p.kind, p.default) for p in inspect.signature(make).parameters.values()}
        assert kinds == {(inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty)}
