"""Gradients that are written into the columns of one tensor: the same bits, without the copy."""

import gc
import importlib
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import kernels
from kernels.core.fused_gradients import gradient_for, split_columns

SIZES = [4, 8, 6]
Split = Callable[[Tensor], tuple[Tensor, ...]]
MADE: list[tuple[int, int]] = []  # data_ptr of each gradient, and of its storage


def ordinary(x: Tensor) -> tuple[Tensor, ...]:
    return x.split(SIZES, -1)


def ours(x: Tensor) -> tuple[Tensor, ...]:
    parts = split_columns(x, SIZES)
    assert parts[0].grad_fn is None or parts[0].grad_fn.name() == "_SplitBackward"
    return parts


def poisoned(like: Tensor, *shape: int) -> Tensor:
    """What nobody wrote must not be read."""
    return torch.full(shape, torch.nan, dtype=like.dtype, device=like.device)


class Square(torch.autograd.Function):
    """An op that asks for a place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        dx = gradient_for(x, poisoned)
        assert (dx.shape, dx.dtype) == (x.shape, x.dtype)
        torch.mul(2 * x, dy, out=dx)
        MADE.append((dx.data_ptr(), dx.untyped_storage().data_ptr()))
        return dx


square = Square.apply


def heads(x: Tensor) -> Tensor:
    """As mixers do: cut into heads, and joined again."""
    return square(x.unflatten(-1, (2, -1)).flatten(2)).unflatten(-1, (2, -1)).sum(-2)


def all_used(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return heads(a).square().sum() + square(b).sin().sum() + square(c.flatten(0, 1)).cos().sum()


def unused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return square(a).sin().sum() + square(c).cos().sum()


def twice(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return square(a).sin().sum() + square(a).cos().sum() + (square(b) * b).sum() + square(c).sum()


def by_torch(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return square(a).sin().sum() + b.sin().sum() + square(c.transpose(0, 1)).cos().sum()


def only_by_torch(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return a.sin().sum() + c.cos().sum()


def across(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return square(square(a) * square(b)[..., :4]).sum() + square(c.reshape(-1)).sin().sum()


LOSSES = [all_used, unused, twice, by_torch, only_by_torch, across]


def leaf(*shape: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(*(shape or (2, 5, 18)), requires_grad=True)


def gradients(split: Split, loss: Callable[..., Tensor], passes: int = 1, shape: tuple[int, ...] = ()) -> list[Tensor]:
    x = leaf(*shape)
    y = loss(*split(x * 1.5))
    return [torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(passes)]


@pytest.mark.parametrize("shape", [(2, 5, 18), (1, 5, 18), (2, 1, 18), (1, 1, 18)])
@pytest.mark.parametrize("loss", LOSSES)
def test_same_gradients_in_every_pass(loss: Callable[..., Tensor], shape: tuple[int, ...]):
    found, expected = gradients(ours, loss, 3, shape), gradients(ordinary, loss, 1, shape)
    assert all(torch.equal(x, expected[0]) for x in found)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("around", ["checkpoint", "recomputing", "both"])
def test_computed_again(loss: Callable[..., Tensor], around: str):
    weight = torch.randn(18, 18)

    def block(x: Tensor, split: Split) -> Tensor:
        return loss(*split(F.linear(kernels.rms_norm(x), weight)))

    def run(split: Split) -> Tensor:
        x = leaf()
        with kernels.recomputing(around != "checkpoint"):
            y = block(x, split) if around == "recomputing" else checkpoint(block, x, split, use_reentrant=False)
        return torch.autograd.grad(y, x)[0]

    assert torch.equal(run(ours), run(ordinary))


@pytest.mark.parametrize("shape", [(2, 5, 18), (1, 5, 18), (2, 1, 18), (18,)])
@pytest.mark.parametrize("again", [False, True])
def test_nothing_is_copied(shape: tuple[int, ...], again: bool):
    def block(x: Tensor) -> Tensor:
        a, b, c = ours(x)
        return square(a).sum() + square(b.unflatten(-1, (2, -1))).sum() + c.sin().sum()

    MADE.clear()
    inner = leaf(*shape) * 1
    y = checkpoint(block, inner, use_reentrant=False) if again else block(inner)
    (dx,) = torch.autograd.grad(y, inner)
    assert sorted(MADE) == [(dx.data_ptr() + at * 4, dx.untyped_storage().data_ptr()) for at in (0, 4)]
    assert dx.is_contiguous()


def test_a_gradient_that_another_sees_is_not_overwritten():
    def run(split: Split) -> tuple[Tensor, ...]:
        x = leaf() * 1
        a, b, c = split(x)
        inner = a.unflatten(-1, (2, 2))  # whose gradient is not yet all of that of a
        y = square(inner).sum() + a.sin().sum() + square(b).sum() + square(c).sum()
        return torch.autograd.grad(y, [x, inner, a, b])

    assert all(torch.equal(x, y) for x, y in zip(run(ours), run(ordinary), strict=True))


def test_a_pass_that_ends_early():
    x = leaf() * 1
    a, b, c = ours(x)
    y = all_used(a, b, c)
    expected = torch.autograd.grad(all_used(*ordinary(x)), x)[0]
    torch.autograd.grad(y, [a], retain_graph=True)
    early = torch.autograd.grad(y, [b], retain_graph=True)[0]
    kept = early.clone()
    assert torch.equal(torch.autograd.grad(y, x)[0], expected)
    assert torch.equal(early, kept)


def test_hooks_may_change_gradients():
    def run(split: Split) -> Tensor:
        x = leaf() * 1
        a, b, c = split(x)
        a.register_hook(lambda g: 2 * g)
        b.register_hook(lambda g: g.mul_(3))
        return torch.autograd.grad(all_used(a, b, c), x)[0]

    assert torch.equal(run(ours), run(ordinary))


def test_leaves_and_sums():
    found = []
    for split in (ours, ordinary):
        x = leaf()
        for _ in range(2):  # accumulated
            all_used(*split(x)).backward()
        assert x.grad is not None
        y = x.detach().requires_grad_() * 1
        (whole,) = torch.autograd.grad(all_used(*split(y)) + y.exp().sum(), y)
        found.append((x.grad, whole))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_second_derivatives():
    def run(split: Split) -> Tensor:
        x = leaf()
        (dx,) = torch.autograd.grad(only_by_torch(*split(x)), x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), x)[0]

    assert torch.equal(run(ours), run(ordinary))


def test_transforms_and_what_needs_no_gradient():
    x = leaf()
    for split in (ours, ordinary):
        assert not any(part.requires_grad for part in split(x.detach()))
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(ours(x), ordinary(x), strict=True))

    def f(split: Split) -> Callable[[Tensor], Tensor]:
        return lambda x: only_by_torch(*split(x))

    def plain(x: Tensor) -> tuple[Tensor, ...]:
        return split_columns(x, SIZES)

    for transform in (torch.func.grad, lambda g: torch.vmap(torch.func.grad(g)), torch.func.jacfwd):
        assert torch.equal(transform(f(plain))(x), transform(f(ordinary))(x))
    ones = torch.ones_like(x)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, ones)
        tangents = [torch.autograd.forward_ad.unpack_dual(f(split)(dual)).tangent for split in (ours, ordinary)]
    assert torch.equal(*tangents)


@pytest.mark.slow
def test_one_graph():
    def f(x: Tensor) -> Tensor:
        return only_by_torch(*split_columns(x * 2, SIZES))

    x = leaf()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    assert torch.equal(*(torch.autograd.grad(g(x), x)[0] for g in (compiled, f)))


@pytest.mark.slow
def test_many_graphs_do_not_meet_and_nothing_stays():
    expected, alive = gradients(ordinary, all_used)[0], []
    for i in range(100):
        x = leaf()
        parts = ours(x * 1.5)
        node = parts[0].grad_fn
        y = all_used(*parts)
        if i % 3:
            assert torch.equal(torch.autograd.grad(y, x)[0], expected)
            assert node.whole is None
        else:
            torch.autograd.grad(y, parts[:1])
            alive.append(weakref.ref(node))
        del x, parts, node, y
    gc.collect()
    assert not any(node() for node in alive)


def test_passes_at_the_same_time():
    x = leaf()
    y = all_used(*ours(x * 1.5))
    expected, wrong = gradients(ordinary, all_used)[0], []

    def run() -> None:
        for _ in range(50):
            if not torch.equal(torch.autograd.grad(y, x, retain_graph=True)[0], expected):
                wrong.append(1)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_dtypes():
    def run(split: Split) -> Tensor:
        x = leaf()
        weight = torch.randn(18, 18, generator=torch.Generator().manual_seed(2))
        with torch.autocast("cpu", torch.bfloat16):
            a, b, c = split(F.linear(x, weight))
            assert a.dtype == torch.bfloat16
            y = square(a).float().sum() + square(b.float()).sum() + square(c).sin().float().sum()
        return torch.autograd.grad(y, x)[0]

    assert torch.equal(run(ours), run(ordinary))


def written_in_place(x: Tensor, heads: int, size: int, gate_first: bool, again: bool) -> list[Tensor]:
    """The gradient of a small mixer, in which those of all streams lie; and the same put together by a copy."""
    rate, bias = torch.zeros(2, heads, device=x.device)
    weight, sizes = torch.randn(heads * size, 1, 4, device=x.device), [heads * size] * 3 + [heads]
    arrived: list[int] = []

    def feature(part: Tensor) -> Tensor:
        return kernels.features(part.unflatten(-1, (heads, size)), weight, activation="silu", norm="l2")[0]

    def block(x: Tensor, split: Callable[..., tuple[Tensor, ...]]) -> Tensor:
        q, v, gate, a = split(x, sizes)
        for part in (q, v, gate, a):
            part.register_hook(lambda g: arrived.append(g.untyped_storage().data_ptr()))
        with kernels.backend("triton"):
            gate = gate.unflatten(-1, (heads, size))
            o = kernels.gated_rms_norm(feature(q) * feature(v), gate, gate_first=gate_first)
            log_decay, _ = kernels.discretise(a, rate, bias)
        return (o * log_decay.exp()[..., None]).sin().sum()

    found = []
    for split in (split_columns, lambda x, sizes: x.split(sizes, -1)):
        arrived.clear()
        inner = x.detach().requires_grad_() * 1
        y = checkpoint(block, inner, split, use_reentrant=False) if again else block(inner, split)
        found.append(torch.autograd.grad(y, inner)[0])
        together = set(arrived) == {found[-1].untyped_storage().data_ptr()}
        assert together == (split is split_columns)
        assert len(arrived) == 4
    return found


@pytest.mark.slow
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")
def test_the_kernels_write_in_place(gate_first: bool, again: bool, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton")
    for op in ("features", "norm", "discretise"):
        module = importlib.import_module(f"kernels.{op}.gpu.op")
        poison = partial(lambda new, *given, **options: new(*given, **options).fill_(torch.nan), module.new)
        monkeypatch.setattr(module, "new", poison)
    assert torch.equal(*written_in_place(torch.randn(2, 6, 75), 3, 8, gate_first, again))


@pytest.mark.gpu
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("heads", [7, 16])  # a row is not, and is, a multiple of 16 bytes
def test_the_kernels_write_in_place_on_device(heads: int, again: bool):
    pytest.importorskip("triton")
    x = torch.randn(4, 1000, heads * (3 * 128 + 1), device="cuda", dtype=torch.bfloat16)
    found, expected = written_in_place(x, heads, 128, False, again)
    if heads == 16:
        assert torch.equal(found, expected)
    else:  # other kernels, which may sum in another order
        assert (found - expected).float().norm() <= 1e-3 * expected.float().norm()


@pytest.mark.gpu
def test_streams_do_not_share_a_place():
    found = []
    for split in (split_columns, lambda x, sizes: x.split(sizes, -1)):
        x = torch.randn(64, 512, 1024, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
        x = x.requires_grad_() * 1
        a, b = split(x, [512, 512])
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            left = Square.apply(a).sin().sum()
        torch.cuda.current_stream().wait_stream(side)
        found.append(torch.autograd.grad(left + Square.apply(b).sin().sum(), x)[0])
    assert torch.equal(*found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")
def test_a_place_that_a_kernel_cannot_write_to():
    pytest.importorskip("triton")
    found = []
    for split in (split_columns, lambda x, sizes: x.split(sizes, -1)):
        x = leaf(2, 6, 30)
        a, b = split(x * 1, [24, 6])
        gate = a.unflatten(-1, (2, 3, 4))  # the outer axes of whose rows are not one
        with kernels.backend("triton"):
            y = kernels.gated_rms_norm(torch.ones_like(gate), gate).sin().sum() + b.sin().sum()
        found.append(torch.autograd.grad(y, x)[0])
    assert torch.equal(*found)
