"""Token after token: as the model is written, and as a graph over tensors that stay where they are."""

import math
from functools import partial

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

import mixers
from tests.mixers.variants import CAUSAL
from zoo.generation import decoder as decoders
from zoo.generation.decoder import Decoder
from zoo.generation.generate import generate_tokens, sample_tokens
from zoo.generation.graphs import DecodingGraphs, fits, overwrite
from zoo.lm.model import LanguageModel
from zoo.lm.stack import Uniform

pytest_plugins = "tests.zoo.generation.pretended"


def build(name: str) -> LanguageModel:
    model = LanguageModel(Uniform(CAUSAL[name]), vocab_size=11, hidden_size=64, num_heads=2, num_layers=2)
    return model.eval()


@pytest.mark.slow
@pytest.mark.parametrize("name", CAUSAL)
def test_a_step_in_place_is_the_eager_step(name: str, captures: list[torch.device]):
    """To the bit if both have the same room; the state of attention without room has other shapes."""
    model, prompt, tokens = build(name), torch.randint(11, (3, 9)), torch.randint(11, (8, 3))
    with torch.no_grad():
        _, state = model(prompt, model.init_state(3))
    graphs = DecodingGraphs()
    inside, outside = (Decoder(model, tree_map(torch.clone, state), each) for each in (graphs, DecodingGraphs(False)))
    places = None
    with torch.no_grad():
        for t, token in enumerate(tokens):
            direct, state = model(token[:, None], state)
            logits = inside(token)
            assert torch.equal(logits, outside(token)), t
            torch.testing.assert_close(logits, direct[:, -1])
            memory = [leaf.data_ptr() for leaf in tree_leaves(inside.state)]
            assert places in (None, memory)
            places = memory
    for one, other, alone in zip(*map(tree_leaves, (inside.state, outside.state, state)), strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one[:, -alone.shape[1] :] if alone.dim() > 1 else one, alone)
    assert graphs.refused is None
    assert len(captures) == 1


@pytest.mark.parametrize(("room", "expected_captures"), [(1, 4), (12, 1)])
def test_a_state_without_room_is_padded_and_captured_again(
    room: int, expected_captures: int, captures: list[torch.device], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(decoders, "ROOM", 4)
    model, tokens = build("SoftmaxAttention"), torch.randint(11, (12, 2))
    with torch.no_grad():
        _, state = model(torch.randint(11, (2, 3)), model.init_state(2))
    decoder = Decoder(model, tree_map(torch.clone, state), DecodingGraphs(), room=room)
    for token in tokens:
        with torch.no_grad():
            expected, state = model(token[:, None], state)
        torch.testing.assert_close(decoder(token), expected[:, -1])
    assert len(captures) == expected_captures


def test_a_large_state_that_grows_is_decoded_eagerly(captures: list[torch.device], monkeypatch: pytest.MonkeyPatch):
    """Also if it becomes too large after it was padded; no entry may be dropped then."""
    monkeypatch.setattr(decoders, "ROOM", 4)
    monkeypatch.setattr(decoders, "KEPT_BYTES", 9000)
    model, graphs, tokens = build("SoftmaxAttention"), DecodingGraphs(), torch.randint(11, (12, 2))
    with torch.no_grad():
        _, state = model(torch.randint(11, (2, 3)), model.init_state(2))
    decoder = Decoder(model, tree_map(torch.clone, state), graphs, room=1)
    for number, token in enumerate(tokens):
        with torch.no_grad():
            expected, state = model(token[:, None], state)
        torch.testing.assert_close(decoder(token), expected[:, -1])
        assert (graphs.refused is None) == (number < 5)
    assert "a state that grows takes" in str(graphs.refused)
    assert len(captures) == 2


@pytest.mark.parametrize("typed", [True, False])
def test_a_mixer_that_reads_the_padding_is_not_padded(typed: bool, captures: list[torch.device]):
    """A wrapped module removes it; one that takes all entries as keys would see zeros."""

    class Mean(mixers.TokenMixer):
        constant_state = False

        def __init__(self, site):
            super().__init__()
            self.o_proj = mixers.OutputProjection(site.hidden_size, site.hidden_size)

        def forward(self, x, state=None, *, cu_seqlens=None):
            past = x if state is None else torch.cat([state, x], 1)
            sums = past.cumsum(1) / torch.arange(1, past.shape[1] + 1)[:, None]
            return self.o_proj(sums[:, -x.shape[1] :]), None if state is None else past

        def init_state(self, batch_size, device=None, dtype=None):
            return torch.zeros(batch_size, 0, 64, device=device)

        def state_size(self, length=None):
            return math.inf if length is None else 64 * length

    class Cumulative(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x.cumsum(1))

    mixer = mixers.wrap(lambda size: Cumulative(size, size)) if typed else Mean
    model = LanguageModel(Uniform(mixer), vocab_size=11, hidden_size=64, num_heads=2, num_layers=2).eval()
    graphs = DecodingGraphs()
    run = partial(generate_tokens, model, torch.randint(11, (2, 5)), max_new_tokens=12, temperature=0)
    assert torch.equal(torch.stack([*run(graphs=graphs)])[:8], torch.stack([*run(max_new_tokens=8)]))
    assert "the state grows" in str(graphs.refused)
    assert not captures


def test_a_batch_of_another_size_is_told(captures: list[torch.device]):
    model = build("GLA")
    decoder = Decoder(model, model.init_state(2), DecodingGraphs())
    decoder(torch.tensor([1, 2]))
    with pytest.raises(ValueError, match=r"tokens: expected \(2,\), got shape \(1,\)"):
        decoder(torch.tensor([1]))


def test_what_was_given_stays_where_the_graph_takes_over(captures: list[torch.device]):
    """A rehearsal that wrote into the state would count the first token twice."""
    model = build("GatedDeltaNet")
    with torch.no_grad():
        _, state = model(torch.tensor([[1, 2, 3]]), model.init_state(1))
        before = tree_map(torch.clone, state)
        Decoder(model, state, DecodingGraphs())(torch.tensor([4]))
    assert all(map(torch.equal, tree_leaves(state), tree_leaves(before)))


def test_overwriting_copies_what_is_elsewhere():
    a, b, kept, counter = torch.arange(2.0), torch.arange(2.0) + 5, torch.zeros(3), torch.tensor([7])
    places = [x.data_ptr() for x in (a, b, kept, counter)]
    # the first two change places, so that each is overwritten before it is read
    overwrite((a, b, kept, counter), (b, a, kept.add_(1), counter + 1))
    assert [x.tolist() for x in (a, b, kept, counter)] == [[5.0, 6.0], [0.0, 1.0], [1.0, 1.0, 1.0], [8]]
    assert [x.data_ptr() for x in (a, b, kept, counter)] == places


def test_what_fits():
    x = torch.zeros(2, 3)
    assert fits((x,), (x.bfloat16(),))
    assert not fits((x.bfloat16(),), (x,))
    assert not fits((x,), (torch.zeros(2, 4),))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CAUSAL)
def test_greedy_through_a_graph_is_greedy_without(name: str, dtype: torch.dtype):
    model = LanguageModel(Uniform(CAUSAL[name]), vocab_size=97, hidden_size=64, num_heads=2, num_layers=2)
    model.to("cuda", dtype).eval()
    prompts = [torch.randint(97, (length,), device="cuda") for length in (33, 40, 7)]
    captured, eager = DecodingGraphs(), DecodingGraphs(False)
    options = {"max_new_tokens": 40, "seed": 1}
    expected = [torch.stack(both) for both in zip(*sample_tokens(model, prompts, graphs=eager, **options), strict=True)]
    for _ in range(2):
        drawn = zip(*sample_tokens(model, prompts, graphs=captured, **options), strict=True)
        assert all(map(torch.equal, map(torch.stack, drawn), expected))
        assert captured.refused is None


@pytest.mark.gpu
def test_a_step_that_waits_for_the_device_is_not_captured():
    class Waiting(torch.nn.Module):
        def init_state(self, batch_size, device=None):
            return torch.zeros(batch_size, 1, dtype=torch.int64, device=device)

        def forward(self, tokens, state):
            state = state + tokens
            return torch.nn.functional.one_hot(state % 5, 5).float() * float(state.sum() >= 0), state

    model, graphs = Waiting(), DecodingGraphs()
    decoder = Decoder(model, model.init_state(1, "cuda"), graphs)
    one = torch.ones(1, dtype=torch.int64, device="cuda")
    assert [int(decoder(one).argmax()) for _ in range(3)] == [1, 2, 3]
    assert graphs.refused
    assert torch.rand(3, device="cuda").isfinite().all()  # the device still works
