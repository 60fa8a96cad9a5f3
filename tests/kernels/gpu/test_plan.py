"""Launches that differ in anything that a kernel is compiled for are never taken for each other."""

import gc
import inspect
import weakref
from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl

import kernels
from kernels.core.documents import Documents
from kernels.delta_rule.gpu.plan import DeltaRule
from kernels.gpu.launch import LaunchSpec
from kernels.gpu.plan import Plan, prepared
from kernels.linear_recurrence.gpu import call, multi_pass, one_pass
from kernels.linear_recurrence.gpu.plan import LinearRecurrence
from kernels.selective_scan.gpu.op import SelectiveScan

from .. import recurrences, test_selective_scan

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

    def __init__(self, one: int, dtype: torch.dtype, device: torch.device):
        super().__init__(dtype, device)
        self.one = one

    def place(self, packed: Documents | None) -> None:
        """Of these, nothing is wanted but where they end."""
        self.bounds = None if packed is None else packed.bounds

    @prepared
    def add(self, two: int) -> LaunchSpec:
        """x + y + one + 10 two."""
        return LaunchSpec(add, 1, ONE=self.one, TWO=two, checked=True)


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
    with kernels.deterministic():
        other = made(1)
    assert other is not made(1)


def test_packed_documents_keep_their_plans():
    here, there = torch.tensor([0, 3, 16]), torch.tensor([0, 3, 16])
    assert made(1, here) is made(1, here)
    assert made(1, here) is not made(1, there)
    assert made(1, here).bounds == [0, 3, 16]
    assert made(1).bounds is None


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_documents_and_their_tables_go_with_the_boundaries(plan: type[Plan]):
    """At once: tables on a device that wait for a collection of cycles are memory that every step adds to."""
    shape, bf16, device = torch.Size([1, 100, 2, 16]), torch.bfloat16, torch.device("cpu")
    stride = torch.empty(shape).stride()
    sizes: dict[type[Plan], tuple] = {
        LinearRecurrence: (shape, stride, stride, shape, stride, bf16, device, "head", True, 1.0, 1, False, False),
        DeltaRule: (shape, shape, 1, 1.0, bf16, device, 2),
        SelectiveScan: (shape[:3], 4, 2, bf16, device),
    }
    boundaries = torch.tensor([0, 30, 100])
    actual = weakref.ref(plan.of(boundaries, 100, *sizes[plan]))
    gc.collect()
    gc.disable()
    try:
        assert actual() is not None
        del boundaries
        assert actual() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("plan", PLANS)
def test_launches_are_made_of_a_plan_and_their_arguments_alone(plan: type[Plan]):
    """No default, which the key would lack, and nothing from an enclosing function."""
    places = (multi_pass, one_pass, call) if plan is LinearRecurrence else (plan,)
    launches: list[Callable] = [f for place in places for f in vars(place).values() if hasattr(f, "__wrapped__")]
    assert launches
    for launch in launches:
        make = launch.__wrapped__
        assert make.__closure__ is None
        kinds = {(p.kind, p.default) for p in inspect.signature(make).parameters.values()}
        assert kinds == {(inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty)}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")
@pytest.mark.parametrize("op", [kernels.delta_rule, kernels.selective_scan])
def test_boundaries_are_read_once(op: Callable, monkeypatch: pytest.MonkeyPatch):
    """Forward and backward, and at each call: on a device that would be a synchronisation."""
    documents, made, create = [0, 3, 8], [], Documents.__init__
    if op is kernels.delta_rule:
        a = recurrences.inputs(8, gate="head", G=1, K=16, V=16, documents=documents, dtype=torch.float32)
    else:
        a = test_selective_scan.inputs(8, documents=documents, dtype=torch.float32)
    a = {name: x.requires_grad_(x.is_floating_point()) for name, x in a.items()}
    monkeypatch.setattr(Documents, "__init__", lambda self, cu_seqlens: made.append(create(self, cu_seqlens)))
    with kernels.backend("triton"):
        for _ in range(2):
            op(**a)[0].sum().backward()
    assert len(made) == 1
