import pytest
import torch

from mixers.token_shift import previous


def test_whole_sequences():
    x = torch.randn(2, 5, 3)
    before, last = previous(x, None)
    assert torch.equal(before[:, 1:], x[:, :-1])
    assert not before[:, 0].any()
    again, _ = previous(x, last)
    assert torch.equal(again[:, :1], last)
    assert torch.equal(last, x[:, -1:])


@pytest.mark.parametrize("continued", [False, True])
def test_packed_documents_are_what_each_is_alone(continued: bool):
    x, bounds = torch.randn(1, 9, 3), torch.tensor([0, 0, 4, 5, 9, 9])
    history = torch.randn(5, 1, 3) if continued else None
    before, last = previous(x, history, bounds)
    for n, (i, j) in enumerate([(0, 0), (0, 4), (4, 5), (5, 9), (9, 9)]):
        own = None if history is None else history[n : n + 1]
        if j > i:
            alone, end = previous(x[:, i:j], own)
            assert torch.equal(before[:, i:j], alone)
            assert torch.equal(last[n : n + 1], end)
        else:  # nothing came after
            assert torch.equal(last[n : n + 1], torch.zeros(1, 1, 3) if own is None else own)
