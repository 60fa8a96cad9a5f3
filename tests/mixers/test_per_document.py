"""A mixer that only knows whole sequences keeps the contract by `per_document`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mixers
from kernels import UserError
from mixers import Cache, OutputProjection, Position, Projection, Site, TokenMixer, per_document, split_heads
from mixers.base import dense_flops


class Seen(NamedTuple):
    k: Cache
    v: Cache
    seen: Position


class Plain(TokenMixer):
    """Softmax attention without positions, in the shortest form."""

    constant_state = False
    window: int | None = None

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.num_heads, self.size = site.heads()
        width = self.num_heads * self.size
        self.in_proj = Projection(site.hidden_size, {"q": width, "k": width, "v": width})
        self.out_proj = OutputProjection(width, site.hidden_size)

    def forward(self, x: Tensor, state: Any = None, *, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Any]:  # type: ignore[override]
        return per_document(self.mix, x, state, cu_seqlens)

    def mix(self, x: Tensor, state: Seen | None) -> tuple[Tensor, Seen | None]:
        q, k, v = (split_heads(part, self.num_heads) for part in self.in_proj(x))
        if state is not None:
            k, v = torch.cat([state.k, k], 1), torch.cat([state.v, v], 1)
        past = torch.arange(k.shape[1]) - torch.arange(k.shape[1] - x.shape[1], k.shape[1])[:, None]
        visible = (past <= 0) if self.window is None else (past <= 0) & (past > -self.window)
        heads_first = (part.transpose(1, 2) for part in (q, k, v))
        o = F.scaled_dot_product_attention(*heads_first, attn_mask=visible)
        y = self.out_proj(o.transpose(1, 2).flatten(2))
        if state is None:
            return y, None
        kept = slice(None) if self.window is None else slice(-(self.window - 1), None)
        return y, Seen(k[:, kept], v[:, kept], state.seen + x.shape[1])

    def init_state(self, batch_size: int, device: Any = None, dtype: Any = None) -> Seen:
        like = self.in_stream
        empty = torch.zeros(
            batch_size, 0, self.num_heads, self.size, device=device or like.device, dtype=dtype or like.dtype
        )
        return Seen(empty, empty, torch.zeros(batch_size, dtype=torch.int64, device=empty.device))

    def state_size(self, length: int | None = None) -> int | float:
        if self.window is not None and length is not None:
            length = min(length, self.window - 1)
        return float("inf") if length is None else 2 * self.num_heads * self.size * length

    def flops(self, length: int) -> int:
        return dense_flops(self, length) + 4 * length * length * self.num_heads * self.size


class Windowed(Plain):
    window = 5


@pytest.mark.parametrize("mixer", [Plain, Windowed])
def test_the_contract_holds(mixer: Callable[[Site], TokenMixer]) -> None:
    assert len(mixers.check_mixer(mixer)) == 10


def test_rows_of_unequal_past_continue_together() -> None:
    """Three documents of 4, 0 and 7 tokens, then one token each, as generation does."""
    mixer = Plain(Site(32, 2)).double()
    x, more = torch.randn(1, 11, 32, dtype=torch.float64), torch.randn(3, 1, 32, dtype=torch.float64)
    _, state = mixer(x, mixer.init_state(3), cu_seqlens=torch.tensor([0, 4, 4, 11]))
    assert state.seen.tolist() == [4, 0, 7]
    assert state.k.shape[1] == 7  # padded in front
    y, state = mixer(more, state)
    assert state.seen.tolist() == [5, 1, 8]
    for row, (start, stop) in enumerate([(0, 4), (4, 4), (4, 11)]):
        alone = mixer(torch.cat([x[:, start:stop], more[row : row + 1]], 1))[0]
        torch.testing.assert_close(y[row], alone[0, -1:])


def test_it_is_called_once_where_sequences_are_alike() -> None:
    calls = []

    def mix(x: Tensor, state: Any) -> tuple[Tensor, Any]:
        calls.append(tuple(x.shape))
        return x, state

    x = torch.zeros(4, 3, 8)
    per_document(mix, x, None, None)
    per_document(mix, x, Plain(Site(8, 1)).init_state(4), None)
    assert calls == [(4, 3, 8)] * 2
    per_document(mix, x[:1], None, torch.tensor([0, 1, 1, 3]))
    assert calls[2:] == [(1, 1, 8), (1, 2, 8)]


def test_a_cache_needs_a_position() -> None:
    class Unnumbered(NamedTuple):
        k: Cache

    with pytest.raises(UserError, match="state: Unnumbered has a Cache, but no Position"):
        per_document(lambda x, state: (x, state), torch.zeros(1, 2, 4), Unnumbered(torch.zeros(1, 0, 4)), None)
