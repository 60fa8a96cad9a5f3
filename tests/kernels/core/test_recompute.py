"""Norms that are computed again: the same gradients from fewer saved numbers."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from kernels import norm


def block(x: Tensor, gate: Tensor, norm: Tensor, weights: list[Tensor]) -> Tensor:
    h = kernels.rms_norm(x, norm)
    a, b = F.linear(h, weights[0]), F.linear(h.flatten(0, 1), weights[1]).view_as(x)
    return F.linear(kernels.gated_rms_norm(a * b, gate, norm), weights[2])


def leaves() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(size).requires_grad_() for size in ((3, 50, 16), (3, 50, 16), (16,), *[(16, 16)] * 3)]


def gradients(y: Tensor, arguments: list[Tensor], retain: bool = False) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y.square().sum(), arguments, retain_graph=retain)


def test_same_gradients_from_less(monkeypatch: pytest.MonkeyPatch):
    arguments = leaves()
    expected = block(*arguments[:3], arguments[3:])
    made, run = [], norm.OP.implementations["torch"]
    for op in (norm.OP, norm.GATED):
        monkeypatch.setitem(op.implementations, "torch", lambda *a: made.append(a) or run(*a))
    with kernels.recomputing():
        y = block(*arguments[:3], arguments[3:])
    assert torch.equal(y, expected)
    assert len(made) == 2
    usual = gradients(expected, arguments)
    for times in (4, 6):  # each once in each pass, though the first has two users
        actual = gradients(y, arguments, retain=True)
        assert all(torch.equal(x, z) for x, z in zip(actual, usual, strict=True))
        assert len(made) == times


def test_what_is_made_of_recomputed_results_keeps_none_of_them(monkeypatch: pytest.MonkeyPatch):
    x, weight, first = leaves()[0], leaves()[2], leaves()[3]

    def run() -> tuple[Tensor, Tensor]:
        inner = kernels.rms_norm(x)
        return inner, F.linear(kernels.rms_norm(inner, weight), first)

    arguments = [x, weight, first]
    expected = gradients(run()[1], arguments)
    made, compute = [], norm.OP.implementations["torch"]
    monkeypatch.setitem(norm.OP.implementations, "torch", lambda *a: made.append(a) or compute(*a))
    with kernels.recomputing():
        inner, y = run()
    made.clear()
    ordinary = [t for t in gc.get_objects() if type(t) is Tensor and not torch._is_functional_tensor(t)]
    holders = [t for t in ordinary if t.data_ptr() == inner.data_ptr()]
    assert len(holders) == 1  # `inner` itself
    for times in (2, 4):  # each of the two once in each pass
        assert all(torch.equal(a, b) for a, b in zip(gradients(y, arguments, retain=True), expected, strict=True))
        assert len(made) == times


def test_what_was_changed_since_is_kept():
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)

    def run() -> Tensor:
        h = kernels.rms_norm(x)
        h += 1
        return F.linear(h, weight)

    expected = gradients(run(), [x, weight])
    with kernels.recomputing():
        y = run()
    for a, b in zip(gradients(y, [x, weight]), expected, strict=True):
        assert torch.equal(a, b)


def test_without_a_backward_pass_nothing_is_left():
    """Not even what an op saves of its own result, as exp does."""
    x = torch.ones(4, requires_grad=True)
    with kernels.recomputing():
        y = x.exp()
    left = weakref.ref(y)
    del y
    assert left() is None


def test_nothing_is_noted_outside_or_without_gradients():
    x = torch.randn(4, 8)
    with kernels.recomputing():
        assert torch.equal(kernels.rms_norm(x), kernels.rms_norm(x.clone().requires_grad_()))
    y = F.linear(kernels.rms_norm(x.requires_grad_()), torch.eye(8))
    assert torch.equal(y, kernels.rms_norm(x))
