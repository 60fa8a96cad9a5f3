"""What is kept of a chunk in deterministic decoding, and what is computed again."""

from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
from kernels.core.chunking import CHUNK
from mixers import GLA, Site
from mixers.replay import Chunk
from zoo.generation.chunk_decoder import ChunkDecoder
from zoo.lm.model import LanguageModel
from zoo.lm.stack import Uniform

B, SIZES = 3, (8, 4, 1)


def columns(rows: Tensor) -> tuple[Tensor, ...]:
    """A stream of heads, one of channels, and one per head, as a projection has them; and one that is alone."""
    x, y, z = rows.split(SIZES, -1)
    return x.unflatten(-1, (2, 4)), y, z, rows.flip(-1).clone()


def test_streams_stay_columns_of_one_tensor():
    tokens = torch.randn(B, CHUNK, sum(SIZES))
    last = torch.tensor([4, 63, 0])
    given = tokens.clone()
    given[range(B), last] = torch.nan
    streams, inputs = Chunk(None, None, last).kept((columns(given), None, torch.ones(2)))
    assert [len(numbers) for numbers in inputs] == [3, 1]
    newest = tokens[torch.arange(B), last][:, None].clone()
    (streams, *others), again = Chunk(None, inputs, last).kept((columns(newest), None, torch.ones(2)))
    assert again is inputs
    assert others[0] is None
    for actual, expected in zip(streams, columns(tokens), strict=True):
        assert torch.equal(actual, expected)
    assert len({x.untyped_storage().data_ptr() for x in streams}) == 2


def test_the_newest_of_several_steps():
    chunk = Chunk(None, {}, torch.tensor([0, 5]))
    x = torch.arange(2 * 2 * CHUNK).view(2, 2 * CHUNK, 1)
    constant = torch.ones(4)
    newest, same = chunk.newest((x, constant))
    assert newest.flatten().tolist() == [0, 1, 2 * CHUNK + 10, 2 * CHUNK + 11]
    assert same is constant


def test_each_token_is_projected_once(monkeypatch: pytest.MonkeyPatch):
    lengths = []

    def project(self: GLA, x: Tensor, original=GLA.project) -> object:
        lengths.append(x.shape[1])
        return original(self, x)

    monkeypatch.setattr(GLA, "project", project)
    lm = LanguageModel(Uniform(GLA), vocab_size=19, hidden_size=32, num_heads=2, num_layers=1).eval()
    with kernels.deterministic():
        decoder = ChunkDecoder(lm, [torch.arange(5), torch.arange(3)])
        decoder()
        decoder(torch.tensor([1, 2]))
    assert lengths == [CHUNK, 1]
    with pytest.raises(ValueError, match="tokens: only the first call can do without them"):
        decoder()


def test_the_first_call_may_have_tokens():
    lm = LanguageModel(Uniform(GLA), vocab_size=19, hidden_size=32, num_heads=2, num_layers=1).eval()
    with kernels.deterministic():
        first = ChunkDecoder(lm, [torch.arange(5)])(torch.tensor([5]))
        assert torch.equal(first, ChunkDecoder(lm, [torch.arange(6)])())


@pytest.mark.parametrize("method", ["forward", "mixed"])
def test_a_mixer_that_computes_in_its_own_way_gets_all_tokens(method: str):
    def other(self: GLA, *arguments: Any, **options: Any) -> Any:
        y, state = getattr(GLA, method)(self, *arguments, **options)
        return y / 2, state

    site, own = Site(hidden_size=32, num_heads=2), type("Own", (GLA,), {method: other})
    chunk = Chunk(own(site).init_state(1), None, torch.tensor([0]))
    assert own(site).replay(torch.zeros(1, CHUNK, 32), chunk) is None
    assert GLA(site).replay(torch.zeros(1, CHUNK, 32), chunk) is not None
