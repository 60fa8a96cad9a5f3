"""Deterministic decoding keeps the streams of a chunk, and computes everything else of it again."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kernels
from kernels.core.chunking import CHUNK
from mixers import GLA, Site, Streams
from mixers.replay import Chunk
from zoo.generation.chunk_decoder import ChunkDecoder
from zoo.generation.generate import sample_tokens
from zoo.lm.model import LanguageModel
from zoo.lm.stack import Uniform

B, SIZES = 3, (8, 4, 1)


def columns(rows: Tensor) -> tuple[Tensor, ...]:
    """A stream of heads, one of channels, and one per head, as a projection has them; and one that is alone."""
    x, y, z = rows.split(SIZES, -1)
    return x.unflatten(-1, (2, 4)), y, z, rows.flip(-1).clone()


@pytest.mark.parametrize("whole_rows", [True, False])
def test_streams_stay_columns_of_one_tensor(whole_rows: bool):
    tokens = torch.randn(B, CHUNK, sum(SIZES))
    last = torch.tensor([4, 63, 0])
    at = torch.arange(B) * CHUNK + last
    given = tokens.clone()
    given[range(B), last] = torch.nan
    streams, inputs = Chunk(None, None, at).kept((columns(given), None, torch.ones(2)))
    assert [len(numbers) for numbers in inputs] == [3, 1]
    newest = columns(tokens[torch.arange(B), last][:, None].clone())
    if not whole_rows:  # a kernel may return the newest token of each stream in memory of its own
        newest = tuple(x.clone() for x in newest)
    (streams, *others), again = Chunk(None, inputs, at).kept((newest, None, torch.ones(2)))
    assert again is inputs
    assert others[0] is None
    for actual, expected in zip(streams, columns(tokens), strict=True):
        assert torch.equal(actual, expected)
    assert len({x.untyped_storage().data_ptr() for x in streams}) == 2


def test_the_newest_of_several_steps():
    chunk = Chunk(None, {}, torch.tensor([0, CHUNK + 5]))
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
    assert not own(site).takes_chunks
    assert GLA(site).takes_chunks


class Odd(GLA):
    """Streams that are not columns of a projection: copies, a stream per token, a wide constant, and a parameter."""

    def __init__(self, site: Site):
        super().__init__(site)
        self.shift = nn.Parameter(torch.randn(1, CHUNK, 1))

    def project(self, x: Tensor) -> Streams:
        s = super().project(x)
        gate = s.gate, x.mean(-1), self.shift[0, :4].T.expand(*x.shape[:2], -1), self.shift
        return s.replace(q=s.q.contiguous(), k=s.k.contiguous(), gate=gate)

    def gates(self, s: Streams) -> Streams:
        return super().gates(s.replace(v=s.v * s.gate[1][..., None, None]))

    def readout(self, o: Tensor, s: Streams) -> Tensor:
        gate, mean, wide, shift = s.gate
        return super().readout(o * (mean + wide.sum(-1) + shift.sum())[..., None, None], s.replace(gate=gate))


@pytest.mark.parametrize("lengths", [(5,), (5, CHUNK - 1)])
def test_all_kinds_of_streams(lengths: tuple[int, ...]):
    lm = LanguageModel(Uniform(Odd), vocab_size=19, hidden_size=32, num_heads=2, num_layers=2).eval()
    prompts = [torch.arange(length) % 19 for length in lengths]
    with kernels.deterministic():
        drawn = [*sample_tokens(lm, prompts, max_new_tokens=4, seed=1)]
        for row, prompt in enumerate(prompts):
            tokens = torch.cat([prompt, *(token[row : row + 1] for token, _ in drawn)])[None]
            losses = lm.token_losses(tokens[:, :-1], tokens[:, 1:]).losses[0, -4:]
            assert torch.equal(losses, -torch.stack([score[row] for _, score in drawn]))


def test_hooks_see_the_newest_token():
    lm = LanguageModel(Uniform(GLA), vocab_size=19, hidden_size=32, num_heads=2, num_layers=1).eval()
    lengths = []
    lm.mixers[0].register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    with kernels.deterministic():
        ChunkDecoder(lm, [torch.arange(5)])(torch.tensor([5]))
    assert lengths == [CHUNK, 1]
