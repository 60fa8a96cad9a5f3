"""Token after token: as the model is written, and as a graph over tensors that stay where they are."""

from functools import partial

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

import zoo
from tests.mixers.variants import CAUSAL
from zoo.generation import decoder as decoders
from zoo.generation.decoder import Decoder, fits, overwrite
from zoo.generation.generate import generate_tokens
from zoo.lm.model import LanguageModel
from zoo.lm.stack import Uniform


def build(name: str) -> LanguageModel:
    model = LanguageModel(Uniform(CAUSAL[name]), vocab_size=11, hidden_size=64, num_heads=2, num_layers=2)
    return model.eval()


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Steps as a graph runs them, without one: on the tensors of the first call, whatever is given to the others."""
    made = []

    def capture(rehearse, step, device):
        made.append(device)
        rehearse()
        result = None

        def replay():
            nonlocal result
            result = step() if result is None else result.copy_(step())
            return result

        return replay

    monkeypatch.setattr(decoders, "capture", capture)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", CAUSAL)
def test_in_place_is_what_the_model_says(name: str, pretended: list[torch.device]):
    model, prompt, tokens = build(name), torch.randint(11, (3, 9)), torch.randint(11, (3, 8))
    with torch.no_grad():
        _, state = model(prompt, model.init_state(3))
        decoder = Decoder(model, tree_map(torch.clone, state), capture=True)
        places = None
        for t in range(8):
            expected, state = model(tokens[:, t : t + 1], state)
            assert torch.equal(decoder(tokens[:, t : t + 1]), expected), t
            found = [leaf.data_ptr() for leaf in tree_leaves(decoder.state)]
            assert places in (None, found) or decoder.refused
            places = found
    for one, other in zip(tree_leaves(decoder.state), tree_leaves(state), strict=True):
        assert torch.equal(one, other)
    assert (decoder.refused is not None) == (not all(mixer.constant_state for mixer in model.mixers))
    assert len(pretended) == 1


def test_on_a_processor_nothing_is_captured(pretended: list[torch.device]):
    model = build("GLA")
    Decoder(model, model.init_state(1))(torch.tensor([[1]]))
    assert not pretended


def test_a_batch_of_another_size_is_told(pretended: list[torch.device]):
    model = build("GLA")
    decoder = Decoder(model, model.init_state(2), capture=True)
    decoder(torch.tensor([[1], [2]]))
    with pytest.raises(ValueError, match=r"tokens: expected \(2, 1\), got shape \(1, 1\)"):
        decoder(torch.tensor([[1]]))


def test_what_was_given_stays_where_the_graph_takes_over(pretended: list[torch.device]):
    """A rehearsal that wrote into the state would count the first token twice."""
    model = build("GatedDeltaNet")
    with torch.no_grad():
        _, state = model(torch.tensor([[1, 2, 3]]), model.init_state(1))
        before = tree_map(torch.clone, state)
        Decoder(model, state, capture=True)(torch.tensor([[4]]))
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
@pytest.mark.parametrize("config", ["gated_deltanet.yaml", "gdn_h2.yaml", "gla.yaml", "hgrn1.yaml", "tnl.yaml"])
def test_greedy_through_a_graph_is_greedy_without(config: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    model = zoo.build(config, "model.vocab_size=97", "model.num_layers=6", device="cuda").to(dtype)
    prompts, made = torch.randint(97, (4, 33), device="cuda"), []

    def spied(*given):
        made.append(given)
        return capture(*given)

    capture = decoders.capture
    monkeypatch.setattr(decoders, "capture", spied)
    run = partial(generate_tokens, model, prompts, max_new_tokens=40, temperature=0)
    captured = torch.stack(list(run()))
    monkeypatch.setattr(Decoder, "_prepare", lambda self, tokens: setattr(self, "refused", "not now"))
    assert torch.equal(captured, torch.stack(list(run())))
    assert len(made) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("configs", [("gated_deltanet.yaml",), ("kda.yaml", "ablate/preconditioned.yaml")])
def test_a_graph_is_made_and_says_what_the_model_says(configs: tuple[str, ...]):
    model = zoo.build(*configs, "model.vocab_size=97", "model.num_layers=3", device="cuda")
    tokens = torch.randint(97, (2, 8), device="cuda")
    with torch.no_grad():
        _, state = model(tokens, model.init_state(2))
        decoder = Decoder(model, tree_map(torch.clone, state))
        for t in range(8):
            expected, state = model(tokens[:, t : t + 1], state)
            torch.testing.assert_close(decoder(tokens[:, t : t + 1]), expected, rtol=1e-5, atol=1e-5)
    assert decoder.refused is None
    for one, other in zip(tree_leaves(decoder.state), tree_leaves(state), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_a_step_that_waits_for_the_device_is_not_captured():
    class Waiting(torch.nn.Module):
        def forward(self, tokens, state):
            state = state + tokens
            return torch.nn.functional.one_hot(state % 5, 5).float() * float(state.sum() >= 0), state

    decoder = Decoder(Waiting(), torch.zeros(1, 1, dtype=torch.int64, device="cuda"))
    one = torch.ones(1, 1, dtype=torch.int64, device="cuda")
    assert [int(decoder(one).argmax()) for _ in range(3)] == [1, 2, 3]
    assert decoder.refused
    assert torch.rand(3, device="cuda").isfinite().all()  # the device is none the worse for it


@pytest.mark.gpu
def test_a_growing_state_is_decoded_as_it_is():
    model = zoo.build("transformer.yaml", "model.vocab_size=97", "model.num_layers=2", device="cuda")
    decoder = Decoder(model, model.init_state(1))
    tokens = torch.randint(97, (1, 5), device="cuda")
    found = torch.cat([decoder(tokens[:, t : t + 1]) for t in range(5)], 1)
    torch.testing.assert_close(found, model(tokens)[0].detach(), rtol=1e-3, atol=1e-3)
    assert "grows" in str(decoder.refused)
