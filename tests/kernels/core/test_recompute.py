"""Norms that are computed again: the same gradients from fewer saved numbers."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import kernels
from kernels import norm
from kernels.core.recompute import noted, remake


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


def through_view(h: Tensor) -> Tensor:
    h.view(-1)[:3].mul_(2)
    return h


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {"itself": lambda h: h.add_(1), "through a view": through_view}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_was_changed_since_is_kept(change: Callable[[Tensor], Tensor]):
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)

    def run() -> Tensor:
        return F.linear(change(kernels.rms_norm(x)), weight)

    expected = gradients(run(), [x, weight])
    with kernels.recomputing():
        y = run()
    for a, b in zip(gradients(y, [x, weight]), expected, strict=True):
        assert torch.equal(a, b)


OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token shift": lambda a, w: kernels.token_shift(a, w[None])[0],
    "norm of a mix": lambda a, w: kernels.rms_norm(kernels.sigmoid_mix(a, a / 2, a, w)),
}


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.parametrize("changed", ["input", "weight"])
def test_a_result_is_kept_if_what_it_is_made_of_was_changed_since(op: Callable[[Tensor, Tensor], Tensor], changed: str):
    x, w, weight = (torch.randn(size, requires_grad=True) for size in ((1, 4, 8), (8,), (8, 8)))

    def run() -> Tensor:
        a, b = 2 * x, w.detach().clone()
        h = op(a, b)
        (a if changed == "input" else b).add_(1)
        return F.linear(h, weight)

    expected = gradients(run(), [weight])
    with kernels.recomputing():
        y = run()
    assert torch.equal(gradients(y, [weight])[0], expected[0])


LATE: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "saved tensor": lambda a, w: (F.linear(a, w), a),
    "argument": lambda a, w: (F.linear(kernels.token_shift(a, torch.ones(1, 8))[0], w), a),
    "argument of an argument": lambda a, w: (
        F.linear(kernels.rms_norm(kernels.token_shift(a, torch.ones(1, 8))[0]), w),
        a,
    ),
    "weight": lambda a, w: (F.linear(a, w), w),
}


@pytest.mark.parametrize("case", LATE.values(), ids=LATE)
def test_a_change_after_saving_is_an_error(case: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]):
    x, weight = torch.randn(1, 4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    with kernels.recomputing():
        y, changed = case(2 * x, weight)
    with torch.no_grad():
        changed.add_(1)
    with pytest.raises(RuntimeError, match=r"shape \[.*8\] that the backward pass needs.*its version is 1, expected 0"):
        gradients(y, [x, weight])


def test_a_checkpoint_inside_saves_as_when_it_recomputes():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = ((2, 4, 16), (32, 16), (16, 16))
    arguments = [torch.randn(size, device=device, requires_grad=True) for size in sizes]

    def run() -> Tensor:
        return checkpoint(kernels.gated_mlp, *arguments, use_reentrant=False)

    with kernels.backend("triton"):
        expected = torch.autograd.grad(run().sum(), arguments)
        with kernels.recomputing():
            y = run()
        actual = torch.autograd.grad(y.sum(), arguments)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "part": lambda h: h[1:3, 2:7],
    "steps": lambda h: h[::2, 1::3],
    "transposed": lambda h: h.T,
    "repeated": lambda h: h[1:2].expand(4, -1),
    "view of a view": lambda h: h.view(2, 2, 8)[1].T[3:],
    "all of it": lambda h: h.view(-1),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_are_views_of_the_recomputed_result(view: Callable[[Tensor], Tensor]):
    x = torch.randn(4, 8, requires_grad=True)
    factor = torch.randn(view(x).shape, requires_grad=True)
    expected = gradients(view(kernels.rms_norm(x)) * factor, [x, factor])
    with kernels.recomputing():
        h = kernels.rms_norm(x)
        y = view(h) * factor
    freed = weakref.ref(h)
    del h
    assert freed() is None
    assert all(torch.equal(a, b) for a, b in zip(gradients(y, [x, factor]), expected, strict=True))


class InLargerMemory(torch.autograd.Function):
    """A copy of h [4,8] in front of other numbers."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        memory = torch.cat([h, torch.ones_like(h)]).untyped_storage()
        return h.new_empty(0).set_(memory, 0, h.shape, h.stride())

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


def beyond(h: Tensor) -> Tensor:
    """A view of a result that reaches beyond it."""
    return remake(InLargerMemory.apply(h), torch.clone, h).as_strided((4, 8), (16, 1))


def of_other_memory(h: Tensor) -> Tensor:
    h.data = 2 * h.data
    return h


ALIASES: dict[str, Callable[[Tensor], Tensor]] = {
    "other memory": of_other_memory,
    "negated": lambda h: torch.imag(torch.view_as_complex(h.unflatten(-1, (-1, 2))).conj()),
    "another dtype": lambda h: torch.view_as_complex(h.unflatten(-1, (-1, 2))),
    "without history": lambda h: h.detach(),
    "beyond the result": beyond,
}


@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES)
def test_other_tensors_in_the_memory_of_a_result_are_saved(alias: Callable[[Tensor], Tensor]):
    x = torch.randn(4, 8, requires_grad=True)
    factor = torch.randn(alias(x).shape, requires_grad=True)

    def run() -> Tensor:
        return torch.view_as_real(y) if (y := alias(kernels.rms_norm(x)) * factor).is_complex() else y

    expected = gradients(run(), [factor])
    with kernels.recomputing():
        y = run()
    assert all(torch.equal(a, b) for a, b in zip(gradients(y, [factor]), expected, strict=True))


def test_nothing_is_noted_in_a_block_that_is_recomputed_as_a_whole():
    x = torch.randn(4, 8, requires_grad=True)
    with kernels.recomputing():
        before = kernels.rms_norm(x)
        with kernels.recomputing(False):
            assert not noted(kernels.rms_norm(x))
            with kernels.recomputing():
                assert not noted(kernels.rms_norm(x))
        assert noted(before)
        assert noted(kernels.rms_norm(x))


def test_a_result_may_be_a_view():
    x = torch.randn(4, 8, requires_grad=True)
    with kernels.recomputing():
        h = remake((2 * x).view(8, 4), lambda x: (2 * x).view(8, 4), x)
        assert noted(h)
        assert not noted(h[:2])


class InMemory(torch.autograd.Function):
    """A copy of x in certain memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, memory: bytearray) -> Tensor:
        return torch.frombuffer(memory, dtype=x.dtype).copy_(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


def test_a_tensor_in_the_place_of_a_freed_result_is_not_taken_for_it():
    x, factor = (torch.randn(8, requires_grad=True) for _ in range(2))
    memory = bytearray(x.nbytes)
    with kernels.recomputing():
        h = remake(InMemory.apply(x, memory), torch.clone, x)
        place, address, version = id(h), h.data_ptr(), h._version
        del h
        others = [torch.frombuffer(memory, dtype=x.dtype).zero_(), *(torch.zeros(8).zero_() for _ in range(100))]
        products = [other * factor for other in others]
    memory[:] = torch.full((8,), 3.0).numpy().tobytes()
    assert (others[0].data_ptr(), {other._version for other in others}) == (address, {version})
    assert place in map(id, others)
    for other, y in zip(others, products, strict=True):
        assert torch.equal(torch.autograd.grad(y.sum(), factor)[0], other)


def test_a_view_in_the_place_of_a_freed_result_is_recomputed():
    x = torch.randn(4, 8, requires_grad=True)
    with kernels.recomputing():
        h, *freed = (kernels.rms_norm(x) for _ in range(100))
        places = set(map(id, freed))
        freed.clear()
        views = [h.view(-1) for _ in range(100)]
        assert places & set(map(id, views))
        assert all(map(noted, views))


def test_without_a_backward_pass_nothing_is_left():
    """Not even what an op saves of its own result, as exp does."""
    x = torch.ones(4, requires_grad=True)
    with kernels.recomputing():
        y = x.exp()
        h = kernels.rms_norm(y)
        z = F.linear(h, torch.ones(4, 4, requires_grad=True))
    left = [weakref.ref(result) for result in (y, h, z)]
    del y, h, z
    assert [result() for result in left] == [None] * 3


def test_nothing_is_noted_outside_or_without_gradients():
    x = torch.randn(4, 8)
    with kernels.recomputing():
        assert torch.equal(kernels.rms_norm(x), kernels.rms_norm(x.clone().requires_grad_()))
    y = F.linear(kernels.rms_norm(x.requires_grad_()), torch.eye(8))
    assert torch.equal(y, kernels.rms_norm(x))
