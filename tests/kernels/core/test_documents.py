from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
from kernels.core.documents import Documents, tracked

from ..places import PLACES


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_owner_and_positions(dtype: torch.dtype):
    actual = kernels.documents(torch.tensor([0, 0, 3, 3, 5, 6, 6], dtype=dtype), 6)
    assert actual.spans == [(0, 0), (0, 3), (3, 3), (3, 5), (5, 6), (6, 6)]
    assert actual.owner.tolist() == [1, 1, 1, 3, 3, 4]
    assert actual.positions.tolist() == [0, 1, 2, 0, 1, 0]


@pytest.mark.slow
@pytest.mark.parametrize("op", [kernels.linear_recurrence, kernels.window_attention])
def test_compilation_names_cu_seqlens_as_the_cause_of_a_graph_break(op: Callable[..., Any]):
    args, bounds = torch.rand(3, 1, 5, 2, 4).unbind(), torch.tensor([0, 2, 2, 5])
    with pytest.raises(torch._dynamo.exc.Unsupported, match="values of cu_seqlens are read on the host"):
        torch.compile(op, fullgraph=True, backend="eager")(*args, cu_seqlens=bounds)
    actual, expected = (f(*args, cu_seqlens=bounds) for f in (torch.compile(op, backend="eager"), op))
    torch.testing.assert_close(actual, expected)


def test_values_are_read_once_per_tensor():
    bounds = torch.tensor([0, 2, 5])
    assert kernels.documents(bounds, 5) is kernels.documents(bounds, 5)
    assert kernels.documents(bounds.clone(), 5) is not kernels.documents(bounds, 5)


def test_a_remembered_tensor_is_still_checked():
    bounds = torch.tensor([0, 2, 5])
    kernels.documents(bounds, 5)
    with pytest.raises(ValueError, match=r"^cu_seqlens: ends at 5, .* 6 tokens"):
        kernels.documents(bounds, 6)
    with pytest.raises(ValueError, match=r"^cu_seqlens: .* 1 row"):
        kernels.documents(bounds, 5, 2)


def test_a_wrong_tensor_stays_wrong():
    # a memo must not turn the second attempt into a success
    bounds = torch.tensor([0, 4, 2, 5])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^cu_seqlens: .* never decrease"):
            kernels.documents(bounds, 5)


def streams(T: int, where: str) -> dict[str, Tensor]:
    q, k, v = torch.randn(3, 1, T, 2, 16, device=where).unbind()
    return {"q": q, "k": torch.nn.functional.normalize(k, dim=-1), "v": v}


def recurrence(op: Callable[..., tuple[Tensor, Tensor | None]]) -> Callable[[Tensor], Tensor]:
    a = {**streams(9, "cpu"), "log_decay": -torch.rand(1, 9, 2), "beta": torch.rand(1, 9, 2)}
    return lambda bounds: op(**{name: x.to(bounds.device) for name, x in a.items()}, cu_seqlens=bounds)[0]


def attention(bounds: Tensor) -> Tensor:
    torch.manual_seed(0)
    return kernels.window_attention(**streams(9, "cpu"), window_size=4, cu_seqlens=bounds)


def convolution(bounds: Tensor) -> Tensor:
    torch.manual_seed(0)
    return kernels.short_conv(torch.randn(1, 9, 4), torch.randn(4, 1, 3), cu_seqlens=bounds)[0]


def scan(bounds: Tensor) -> Tensor:
    torch.manual_seed(0)
    return kernels.selective_scan(torch.randn(1, 9, 4), -torch.rand(1, 9, 4), cu_seqlens=bounds)[0]


OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear_recurrence": recurrence(kernels.linear_recurrence),
    "delta_rule": recurrence(kernels.delta_rule),
    "short_conv": convolution,
    "selective_scan": scan,
    "window_attention": attention,
}
# three ways to change a tensor in place, of which PyTorch counts the first alone
CHANGES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "copy_": lambda x, y: x.copy_(y),
    "data": lambda x, y: x.data.copy_(y),
    "numpy": lambda x, y: x.numpy().__setitem__(slice(None), y.numpy()),
}


@pytest.mark.parametrize("mode", [nullcontext, torch.inference_mode])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("name", OPS)
def test_a_change_in_place_moves_the_boundaries(
    name: str, backend: str, change: str, mode: Callable[[], AbstractContextManager]
):
    op, later = OPS[name], torch.tensor([0, 4, 7, 9])
    with mode(), kernels.backend(backend):
        bounds = torch.tensor([0, 2, 3, 9])
        before = op(bounds)
        CHANGES[change](bounds, later)
        actual, expected = op(bounds), op(later.clone())
    assert torch.equal(actual, expected)
    assert not torch.equal(actual, before)


@pytest.mark.parametrize("where", PLACES)
def test_a_change_in_place_reaches_the_kernels(where: str):
    op, bounds = OPS["linear_recurrence"], torch.tensor([0, 2, 3, 9], device=where)
    with kernels.backend("triton"):
        before = op(bounds)
        bounds[1:3] += 2
        assert torch.equal(op(bounds), op(bounds.clone()))
        assert not torch.equal(op(bounds), before)


def test_a_change_in_place_makes_another_mask():
    bounds = torch.tensor([0, 2, 3, 9])
    masks = [kernels.documents(bounds, 9).once(lambda packed: packed.bounds)]
    bounds[1] = 1
    masks.append(kernels.documents(bounds, 9).once(lambda packed: packed.bounds))
    assert masks == [[0, 2, 3, 9], [0, 1, 3, 9]]


def test_a_wrong_change_in_place_is_refused():
    bounds = torch.tensor([0, 2, 3, 9])
    kernels.documents(bounds, 9)
    bounds[1] = 5
    with pytest.raises(ValueError, match=r"^cu_seqlens: .* never decrease"):
        kernels.documents(bounds, 9)


def test_boundaries_on_a_device_are_not_read_again(monkeypatch: pytest.MonkeyPatch):
    """A stand-in for a device: a tensor whose values cannot be read."""
    bounds = torch.tensor([0, 2, 5])
    documents = kernels.documents(bounds, 5)
    monkeypatch.setattr(Tensor, "is_cpu", property(lambda x: False))
    monkeypatch.setattr(Tensor, "tolist", lambda x: pytest.fail("read again"))
    assert kernels.documents(bounds, 5) is documents
    monkeypatch.undo()
    bounds[1] = 3
    monkeypatch.setattr(Tensor, "is_cpu", property(lambda x: False))
    assert kernels.documents(bounds, 5).bounds == [0, 3, 5]


def test_boundaries_moved_in_inference_mode_are_read_once_per_batch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Tensor, "is_cpu", property(lambda x: False))
    made, create = [], Documents.__init__
    monkeypatch.setattr(Documents, "__init__", lambda self, cu_seqlens: made.append(create(self, cu_seqlens)))
    with torch.inference_mode():
        bounds = tracked(torch.tensor([0, 2, 5]))
        assert not bounds.is_inference()
        assert kernels.documents(bounds, 5) is kernels.documents(bounds, 5)
    assert len(made) == 1
    assert tracked(bounds) is bounds
