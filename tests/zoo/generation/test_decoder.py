"""Token after token: as the model is written, and as a graph over tensors that stay where they are."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

import kernels
import mixers
from tests.mixers.variants import CAUSAL
from zoo.generation import decoder as decoders
from zoo.generation import graphs as owners
from zoo.generation.decoder import Decoder
from zoo.generation.generate import generate_tokens, sample_tokens
from zoo.generation.graphs import DecodingGraphs, fits, overwrite
from zoo.generation.read import read
from zoo.lm import states
from zoo.lm.model import LanguageModel
from zoo.lm.stack import Pattern, Uniform

pytest_plugins = "tests.zoo.generation.pretended"


def build(name: str) -> LanguageModel:
    model = LanguageModel(Uniform(CAUSAL[name]), vocab_size=11, hidden_size=64, num_heads=2, num_layers=2)
    return model.eval()


@torch.no_grad()
def after(model: LanguageModel, lengths: list[int]) -> Any:
    """The state after prompts of some lengths."""
    return read(model, [torch.randint(model.vocab_size, (length,)) for length in lengths])[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", CAUSAL)
def test_a_step_in_place_is_the_eager_step(name: str, captures: list[torch.device]):
    """To the bit if caches have room in both; attention to a cache without room has other shapes."""
    model, tokens = build(name), torch.randint(11, (8, 3))
    state, graphs = after(model, [9, 5, 9]), DecodingGraphs()
    inside, outside = (Decoder(model, tree_map(torch.clone, state), each) for each in (graphs, DecodingGraphs(False)))
    places = None
    with torch.no_grad():
        for t, token in enumerate(tokens):
            direct, state = model(token[:, None], state)
            logits = inside(token)
            assert torch.equal(logits, outside(token)), t
            torch.testing.assert_close(logits, direct[:, -1])
            memory = [leaf.data_ptr() for leaf in tree_leaves(inside._state)]
            assert places in (None, memory)
            places = memory
    for one, other, alone in zip(*map(tree_leaves, (inside.state, outside.state, state)), strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, alone)
    assert graphs.refused is None
    assert len(captures) == 1


@pytest.mark.parametrize(("room", "expected_captures"), [(1, 4), (12, 1)])
def test_a_state_without_room_is_captured_again(
    room: int, expected_captures: int, captures: list[torch.device], monkeypatch: pytest.MonkeyPatch
):
    """In a model that also has windows, which are overwritten several times."""
    monkeypatch.setattr(decoders, "ROOM", 4)
    names = ("SlidingWindowAttention", "SoftmaxAttention", "ForgettingAttention", "MultiheadLatentAttention", "GLA")
    model, tokens = several(*names), torch.randint(11, (12, 2))
    state = after(model, [1, 3])
    decoder = Decoder(model, tree_map(torch.clone, state), DecodingGraphs(), room=room)
    for token in tokens:
        with torch.no_grad():
            expected, state = model(token[:, None], state)
        torch.testing.assert_close(decoder(token), expected[:, -1])
        for one, alone in zip(*map(tree_leaves, (decoder.state, state)), strict=True):
            torch.testing.assert_close(one, alone)
    assert len(captures) == expected_captures


def several(*names: str) -> LanguageModel:
    """A model with a layer of each of these mixers."""
    letters = "ABCDE"[: len(names)]
    stack = Pattern(letters, {letter: CAUSAL[name] for letter, name in zip(letters, names, strict=True)})
    return LanguageModel(stack, vocab_size=11, hidden_size=64, num_heads=2, num_layers=len(names)).eval()


def test_a_state_before_the_first_token(captures: list[torch.device]):
    model, tokens = several("SoftmaxAttention", "SlidingWindowAttention"), torch.randint(11, (9, 2))
    decoder = Decoder(model, model.init_state(2), DecodingGraphs())
    outputs = torch.stack([decoder(token).clone() for token in tokens], 1)
    with torch.no_grad():
        torch.testing.assert_close(outputs, model(tokens.T)[0])
    assert len(captures) == 1


def test_a_graph_that_lacked_room_does_not_share_memory_with_its_successor(
    captures: list[torch.device], monkeypatch: pytest.MonkeyPatch
):
    """Another call takes it while the first one continues."""
    monkeypatch.setattr(decoders, "ROOM", 4)
    model, graphs = several("SlidingWindowAttention", "SoftmaxAttention"), DecodingGraphs()
    states = [after(model, [3]) for _ in range(2)]
    first, second = (Decoder(model, tree_map(torch.clone, state), graphs, room=1) for state in states)
    with torch.no_grad():
        for t, token in enumerate(torch.randint(11, (7, 1))):
            for number, decoder in enumerate((first, second)):
                if number == 0 or t >= 2:
                    expected, states[number] = model(token[:, None], states[number])
                    torch.testing.assert_close(decoder(token), expected[:, -1])
    assert len(captures) == 4  # the first one serves both


def test_a_graph_of_inference_mode_can_serve_other_calls(captures: list[torch.device]):
    with torch.inference_mode():
        model = several("SlidingWindowAttention", "SoftmaxAttention")
        decoder = Decoder(model, after(model, [3]), DecodingGraphs())
        decoder(torch.tensor([1]))
    assert not any(leaf.is_inference() for leaf in tree_leaves(decoder._state))


def test_large_caches_have_a_graph_that_is_not_kept(captures: list[torch.device], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(owners, "KEPT_BYTES", 100)
    model, graphs = build("SoftmaxAttention"), DecodingGraphs()
    decoder = Decoder(model, after(model, [3, 3]), graphs)
    decoder(torch.tensor([1, 2]))
    decoder.close()
    assert graphs.refused is None
    assert (len(captures), graphs._kept) == (1, {})


def test_caches_for_which_memory_lacks_are_decoded_eagerly(
    captures: list[torch.device], monkeypatch: pytest.MonkeyPatch
):
    """Also if it lacks when a state has no more room; no entry may be dropped then."""
    monkeypatch.setattr(decoders, "ROOM", 4)
    model, graphs, tokens = build("SoftmaxAttention"), DecodingGraphs(), torch.randint(11, (12, 2))
    state = after(model, [3, 3])

    def with_room(model: Any, state: Any, size: int) -> Any:
        if size > 8:
            raise torch.OutOfMemoryError("full")
        return states.with_room(model, state, size)

    monkeypatch.setattr(decoders, "with_room", with_room)
    decoder = Decoder(model, tree_map(torch.clone, state), graphs, room=1)
    for number, token in enumerate(tokens):
        with torch.no_grad():
            expected, state = model(token[:, None], state)
        torch.testing.assert_close(decoder(token), expected[:, -1])
        assert (graphs.refused is None) == (number < 5)
    assert "the memory is too small" in str(graphs.refused)
    assert len(captures) == 2


def test_deterministic_mode_adds_no_token_in_place(captures: list[torch.device]):
    model, graphs, token = build("SoftmaxAttention"), DecodingGraphs(), torch.tensor([1, 2])
    state = after(model, [3, 3])
    with torch.no_grad(), kernels.deterministic():
        expected, _ = model(token[:, None], tree_map(torch.clone, state))
        assert torch.equal(Decoder(model, state, graphs)(token), expected[:, -1])
    assert "deterministic mode" in str(graphs.refused)


@pytest.mark.parametrize("typed", [True, False])
def test_other_states_that_grow_are_decoded_eagerly(typed: bool, captures: list[torch.device]):
    """Those of a wrapped module, and of a mixer that takes all entries as keys."""

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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_caches_without_room_and_full_windows_on_a_gpu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """Logits through graphs are those of caches that are copied at each step."""
    monkeypatch.setattr(decoders, "ROOM", 16)
    names = ("SlidingWindowAttention", "SoftmaxAttention", "ForgettingAttention", "MultiheadLatentAttention")
    model, graphs = several(*names).to("cuda", dtype), DecodingGraphs()
    with torch.no_grad():
        _, state = read(model, [torch.randint(11, (length,), device="cuda") for length in (3, 30)])
    decoder = Decoder(model, tree_map(torch.clone, state), graphs, room=1)
    tolerance = {"rtol": 2e-3, "atol": 2e-3} if dtype == torch.float32 else {"rtol": 0.1, "atol": 0.1}
    for token in torch.randint(11, (40, 2), device="cuda"):
        with torch.no_grad():
            expected, state = model(token[:, None], state)
        torch.testing.assert_close(decoder(token), expected[:, -1], **tolerance)
    assert graphs.refused is None
    for one, alone in zip(*map(tree_leaves, (decoder.state, state)), strict=True):
        assert one.shape == alone.shape


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
