"""Streams one token later."""

import pytest
import torch
import torch.nn.functional as F

import kernels
from mixers.shift import recomputed_shift, shifted, shifted_beside


def test_whole_sequences():
    x = torch.randn(2, 5, 3)
    before, last = shifted(x, torch.zeros(2, 3), None)
    assert torch.equal(before[:, 1:], x[:, :-1])
    assert not before[:, 0].any()
    assert torch.equal(last, x[:, -1])
    assert torch.equal(shifted(x, last, None)[0][:, 0], last)
    alone, none = shifted(x, None, None)
    assert torch.equal(alone, before)
    assert none is None


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("bounds", [None, [0, 2, 2]])
def test_a_stream_beside_its_previous_tokens(bounds: list[int] | None, length: int):
    x = torch.randn(2 if bounds is None else 1, length, 3, dtype=torch.float64, requires_grad=True)
    packed = None if bounds is None else torch.tensor([*bounds, length]).clamp(max=length)

    def both(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        previous, same, last = shifted_beside(x, None, packed, None)
        assert last is None
        return previous, same

    previous, same = both(x)
    assert torch.equal(previous, shifted(x, None, packed)[0])
    assert torch.equal(same, x)
    assert torch.autograd.gradcheck(both, (x,))
    assert torch.autograd.gradgradcheck(both, (x,))


@pytest.mark.gpu
def test_columns_one_token_later_on_a_gpu():
    x = torch.randn(3, 70, 200, device="cuda", dtype=torch.bfloat16)[..., 16:144].unflatten(2, (4, 32))
    expected = F.pad(x, (0, 0, 0, 0, 1, -1))
    assert torch.equal(shifted_beside(x, None, None, None)[0], expected)
    assert torch.equal(shifted(x, None, None)[0], expected)


@pytest.mark.parametrize("continued", [False, True])
def test_packed_documents_are_what_each_is_alone(continued: bool):
    x, bounds = torch.randn(1, 9, 3), torch.tensor([0, 0, 4, 5, 9, 9])
    history = torch.randn(5, 3) if continued else torch.zeros(5, 3)
    before, last = shifted(x, history, bounds)
    for n, (i, j) in enumerate([(0, 0), (0, 4), (4, 5), (5, 9), (9, 9)]):
        own = history[n : n + 1]
        if j > i:
            alone, end = shifted(x[:, i:j], own, None)
            assert torch.equal(before[:, i:j], alone)
            assert torch.equal(last[n : n + 1], end)
        else:  # nothing came after
            assert torch.equal(last[n : n + 1], own)


def test_a_state_that_changes_before_the_backward_pass_is_an_error():
    x, before, weight = (torch.randn(size, requires_grad=True) for size in ((1, 4, 8), (1, 8), (8, 8)))
    before = before.detach()
    with kernels.recomputing():
        previous, _ = recomputed_shift(2 * x, before, None, None)
        y = F.linear(previous, weight)
    before.zero_()
    with pytest.raises(RuntimeError, match=r"shape \[1, 8\] that the backward pass needs.*was changed in place"):
        torch.autograd.grad(y.sum(), weight)
