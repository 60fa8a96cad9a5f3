from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import kernels
from kernels.core import autograd

SEEN: list[tuple[Sequence[bool], Sequence[Tensor | None]]] = []


class Toy(NamedTuple):
    a: Tensor
    b: Tensor | None
    index: Tensor | None
    scale: float


def forward(args: Toy) -> tuple[Tensor, Tensor, Tensor]:
    a, b, _, scale = args
    y = a * scale if b is None else a * b * scale
    return y, y.sum(0), a + 1


def backward(args, needed, dy, dsum, kept):
    a, b, _, scale = args
    gradients = (dy, dsum)
    SEEN.append((needed, gradients))
    assert torch.equal(kept, a + 1)
    whole = sum((g.expand_as(a) for g in gradients if g is not None), torch.zeros_like(a)) * scale
    return {"a": whole if b is None else whole * b, "b": None if b is None else whole * a}


def fake(args: Toy) -> tuple[Tensor, Tensor, Tensor]:
    a = args.a
    return torch.empty_like(a), a.new_empty(a.shape[1:]), torch.empty_like(a)


toy = autograd.register("toy", forward, backward, fake, results=2)


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


def product(args: Pair) -> tuple[Tensor]:
    return (args.a * args.b,)


def both_at_once(args, needed, dy):
    parts = torch.stack((args.b, args.a)).mul_(dy)
    return dict(zip("ab", parts.unbind(), strict=True))


pair = autograd.register("pair", product, both_at_once, lambda args: (torch.empty_like(args.a),))


def leaf(*needs: bool) -> list[Tensor]:
    return [torch.randn(3, 4, dtype=torch.float64, requires_grad=need) for need in needs]


def test_gradients():
    torch.autograd.gradcheck(lambda a, b: toy(a, b, None, 2.0), leaf(True, True))
    torch.autograd.gradcheck(lambda a: toy(a, None, torch.arange(3), 2.0), leaf(True))


@pytest.mark.slow
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True), (False, False)])
def test_opcheck(needs: tuple[bool, bool]):
    torch.library.opcheck(torch.ops.token_mixer_zoo.toy.default, (*leaf(*needs), torch.arange(3), 2.0, False))
    torch.library.opcheck(torch.ops.token_mixer_zoo.toy.default, (leaf(needs[0])[0], None, None, 2.0, False))


class Whole(NamedTuple):
    a: Tensor
    b: Tensor
    keep: bool


def whole(args: Whole) -> tuple[Tensor, Tensor]:
    return args.a * args.b, args.a * 1


def whole_backward(args, needed, dy, kept):
    return {"a": dy * args.b, "b": dy * (kept if args.keep else args.a)}


def whole_fake(args: Whole) -> tuple[Tensor, Tensor]:
    return torch.empty_like(args.a), torch.empty_like(args.a)


unread = autograd.register("unread", whole, whole_backward, whole_fake, unread=lambda args: ("a",) * args.keep)


@pytest.mark.parametrize("keep", [True, False])
def test_memory_of_what_is_not_read(keep: bool):
    a, b = leaf(True, True)
    torch.autograd.gradcheck(lambda a, b: unread(a, b, keep), (a, b), check_undefined_grad=False)
    # as another argument it is kept
    torch.autograd.gradcheck(lambda a: unread(a, a, keep), a, check_undefined_grad=False)
    torch.library.opcheck(torch.ops.token_mixer_zoo.unread.default, (a, b, keep, False))
    y = unread(a, b, keep)
    memory = [x.untyped_storage().data_ptr() for x in y.grad_fn.saved_tensors]
    assert (a.untyped_storage().data_ptr() in memory) == (not keep)
    assert b.untyped_storage().data_ptr() in memory


def test_gradients_may_be_parts_of_one_tensor():
    torch.autograd.gradcheck(pair, leaf(True, True))
    torch.library.opcheck(torch.ops.token_mixer_zoo.pair.default, (*leaf(True, True), False))


@pytest.mark.parametrize("create_graph", [False, True])
def test_no_second_derivative(create_graph: bool):
    a, b = leaf(True, True)
    (da,) = torch.autograd.grad(pair(a, b).sin().sum(), a, create_graph=create_graph)
    torch.testing.assert_close(da.detach(), (b * (a * b).cos()).detach())
    assert da.requires_grad is create_graph
    if create_graph:
        with pytest.raises(kernels.UserError, match="gradients of this op cannot be differentiated again"):
            da.sum().backward()


def test_a_second_derivative_by_saved_tensors_alone_is_an_error():
    """The gradient that arrives is a constant, but that of a is b."""
    a, b = leaf(True, True)
    (da,) = torch.autograd.grad(pair(a, b).sum(), a, create_graph=True)
    torch.testing.assert_close(da.detach(), b.detach())
    with pytest.raises(kernels.UserError, match="cannot be differentiated again"):
        torch.autograd.grad(da.sum(), b)
    (db,) = torch.autograd.grad(pair(a.detach(), b).sum(), b, create_graph=True)
    with pytest.raises(kernels.UserError, match="cannot be differentiated again"):
        db.square().sum().backward()


def test_only_what_arrives_and_what_is_wanted():
    a, b = leaf(False, True)
    SEEN.clear()
    toy(a, b, torch.arange(3), 2.0)[1].sum().backward()
    ((needed, gradients),) = SEEN
    assert list(needed) == [False, True, False, False]
    assert gradients[0] is None
    assert a.grad is None
    torch.testing.assert_close(b.grad, 2 * a.detach())


@pytest.mark.parametrize("needs", [(True, True), (False, True)])
def test_one_graph(needs: tuple[bool, bool]):
    arguments = leaf(*needs)
    wanted = [x for x in arguments if x.requires_grad]

    def f(a: Tensor, b: Tensor) -> Tensor:
        return toy(a, b, None, 2.0)[0].sin().sum()

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    actual, expected = (torch.autograd.grad(g(*arguments), wanted) for g in (compiled, f))
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y)
