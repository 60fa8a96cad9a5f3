"""Deterministic decoding keeps the streams of a chunk, and computes everything else of it again."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kernels
from kernels.core.chunking import CHUNK
from mixers import GLA, GatedDeltaProduct, Site, Streams, TokenMixer
from mixers.replay import Chunk
from zoo.generation.chunk_decoder import ChunkDecoder
from zoo.generation.generate import sample_tokens
from zoo.lm.model import LanguageModel
from zoo.lm.stack import Uniform

B = 3
LAST = torch.tensor([4, 63, 0])  # places of the newest tokens


@pytest.mark.parametrize("steps", [1, 2])
def test_streams_of_all_tokens_are_kept(steps: int):
    tokens, constant = torch.randn(B, CHUNK, steps, 3), torch.ones(2)
    expected = tokens.flatten(1, 2)
    chunk = Chunk(None, None, torch.arange(B) * CHUNK + LAST)
    given = tokens.clone()
    given[range(B), LAST] = torch.nan
    _, memory = chunk.kept((given.flatten(1, 2), None, constant), None)
    newest = tokens[range(B), LAST]
    (stream, *others), again = chunk.kept((newest, None, constant), memory)
    assert again is memory
    assert others[0] is None
    assert others[1] is constant
    assert torch.equal(stream, expected)
    assert torch.equal(chunk.newest(stream), newest)
    assert chunk.newest(constant) is constant


def test_packed_sequences_end_with_their_newest_tokens():
    chunk, x, constant = Chunk(None, None, torch.arange(B) * CHUNK + LAST), torch.randn(B, CHUNK, 2), torch.ones(2)
    assert chunk.cu_seqlens.tolist() == [0, 5, 64, 128, 128, 129, 192]
    row, same = chunk.packed((x, constant))
    assert row.shape == (1, B * CHUNK, 2)
    assert same is constant
    assert torch.equal(chunk.unpacked(row), x)


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


class ThreeSteps(GatedDeltaProduct):
    """A number of steps that does not divide a chunk."""

    def __init__(self, site: Site):
        super().__init__(site, num_steps=3)


@pytest.mark.parametrize("mixer", [Odd, ThreeSteps])
@pytest.mark.parametrize("lengths", [(5,), (5, CHUNK - 1)])
def test_all_kinds_of_streams(lengths: tuple[int, ...], mixer: type[TokenMixer]):
    lm = LanguageModel(Uniform(mixer), vocab_size=19, hidden_size=32, num_heads=2, num_layers=2).eval()
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
