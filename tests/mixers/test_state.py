"""What a state remembers is told by the types of its fields, whatever these are called."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import mixers
from mixers import History, Position, Site, TokenMixer, remembered
from mixers.state import Cache, caches, positions_seen


class Inner(NamedTuple):
    caches: tuple[Tensor, Tensor]
    tail: History | None


class Nested(NamedTuple):
    histories: Tensor  # remembered, although others call bookkeeping so
    seen: Position
    inner: Inner
    tails: tuple[History, ...]
    pair: tuple[Tensor, History]


def test_bookkeeping_is_told_by_its_type() -> None:
    *x, other = torch.arange(5.0)
    state = Nested(x[0], other.long(), Inner((x[1], x[2]), other), (other, other), (x[3], other))
    assert [*remembered(state)] == x
    assert [*remembered((x[0], [x[1]], {"a": x[2]}))] == x[:3]
    assert [*remembered(x[0])] == x[:1]


class Averaged(NamedTuple):
    position: Tensor
    last: History


class Averaging(TokenMixer):
    """y_t = W · mean of x_s + V x_{t−1}: by its names its state would be the other way round."""

    def __init__(self, site: Site):
        super().__init__()
        self.size = site.hidden_size
        self.proj, self.shift = (nn.Linear(self.size, self.size, bias=False) for _ in range(2))

    def forward(self, x, state=None, *, cu_seqlens=None):
        if cu_seqlens is not None:
            cuts = cu_seqlens.tolist()
            pieces = [
                self(x[:, i:j], None if state is None else Averaged(*(part[n : n + 1] for part in state)))
                for n, (i, j) in enumerate(zip(cuts, cuts[1:], strict=False))
            ]
            y = torch.cat([piece[0] for piece in pieces], 1)
            return y, None if state is None else Averaged(*map(torch.cat, zip(*(p[1] for p in pieces), strict=True)))
        total, last = self.init_state(len(x)) if state is None else state
        sums = total[:, None] + x.cumsum(1)
        before = torch.cat([last, x], 1)
        y = (self.proj(sums) + self.shift(before[:, :-1])).to(x.dtype)
        end = Averaged(sums[:, -1] if x.shape[1] else total, before[:, -1:])
        return y, None if state is None else end

    def init_state(self, batch_size, device=None, dtype=None):
        zeros = self.proj.weight.new_zeros(batch_size, self.size)
        return Averaged(zeros, zeros[:, None])

    def state_size(self, length=None):
        return self.size

    def flops(self, length):
        return 2 * length * 2 * self.size**2


def test_a_plugin_names_its_fields_as_it_likes() -> None:
    assert len(mixers.check_mixer(Averaging)) == 10


class Untyped(Averaging):
    """Whose history is typed as what it remembers."""

    def init_state(self, batch_size, device=None, dtype=None):
        return tuple(super().init_state(batch_size, device, dtype))


def test_what_is_not_typed_counts() -> None:
    with pytest.raises(mixers.ContractError, match="init_state holds 128 without integers, and what is"):
        mixers.check_mixer(Untyped)


class Cached(NamedTuple):
    last: History
    keys: Cache
    seen: Position


def test_caches_and_the_number_of_tokens_are_told_apart_from_histories() -> None:
    x, seen = torch.ones(2, 3), torch.tensor([4, 5])
    assert caches(Cached(x, x, seen)) == ["keys"]
    assert positions_seen(Cached(x, x, seen)) is seen
    assert (caches(Averaged(x, x)), positions_seen(Averaged(x, x))) == ([], None)


class Unreadable(NamedTuple):
    matrix: "Nowhere"  # noqa: F821


def test_annotations_that_cannot_be_read_are_named() -> None:
    with pytest.raises(mixers.UserError, match=r"^state: the annotations of Unreadable cannot be read: .*Nowhere"):
        list(remembered(Unreadable(torch.ones(1))))
