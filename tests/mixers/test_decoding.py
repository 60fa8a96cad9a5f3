"""A batch that is decoded token by token, each row from where it stands."""

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import mixers
from mixers import Expanded, LinearMixer, Site
from mixers.attention import AttentionState
from mixers.state import caches, remembered

from .variants import CAUSAL, Factory

FACTORIES: dict[str, Factory] = {**CAUSAL, "TPE": mixers.TPE}
FACTORIES |= {
    f"{name}, expanded": Expanded(mixer=factory, factor=2)
    for name, factory in list(FACTORIES.items())
    if isinstance(factory(Site(64, 2)), LinearMixer)
}


@torch.no_grad()
@pytest.mark.parametrize("name", FACTORIES)
def test_two_rows_of_different_age(name: str):
    mixer = FACTORIES[name](Site(64, 2, layer=1, num_layers=3)).double()
    old, young = torch.randn(1, 26, 64, dtype=torch.float64), torch.randn(1, 12, 64, dtype=torch.float64)
    # both prompts packed into one row, then both continued side by side
    prompts = torch.cat([old[:, :19], young[:, :5]], 1)
    packed, state = mixer(prompts, mixer.init_state(2), cu_seqlens=torch.tensor([0, 19, 24]))
    steps, outputs = torch.cat([old[:, 19:], young[:, 5:]]), []
    for t in range(7):
        y, state = mixer(steps[:, t : t + 1], state)
        outputs.append(y)
    decoded = torch.cat(outputs, 1)
    for row, (sequence, start, prompt) in enumerate([(old, 19, packed[:, :19]), (young, 5, packed[:, 19:])]):
        whole, _ = mixer(sequence)
        torch.testing.assert_close(prompt, whole[:, :start])
        torch.testing.assert_close(decoded[row : row + 1], whole[:, start:])


def recurrent(state: Any) -> list[torch.Tensor]:
    """What a state accumulates: all of it but caches and the inputs of convolutions."""
    cached = caches(state) if hasattr(state, "_fields") else []
    if cached or isinstance(state, AttentionState):
        return []
    return list(remembered(state))


@torch.no_grad()
@pytest.mark.parametrize("name", FACTORIES)
def test_states_are_at_least_fp32_where_activations_are_bf16(name: str):
    """Else a state would lose what a token adds to it after a few hundred others."""
    mixer = FACTORIES[name](Site(64, 2, layer=1, num_layers=3)).bfloat16()
    x, state = torch.randn(2, 3, 64).bfloat16(), mixer.init_state(2)
    for now in (state, mixer(x, state)[1], mixer(x[:, :1], mixer.init_state(2, dtype=torch.bfloat16))[1]):
        assert {tensor.dtype for tensor in recurrent(now)} <= {torch.float32, torch.float64}
    assert recurrent(state) or not mixer.constant_state or isinstance(state, AttentionState)


MATRICES = [name for name, factory in FACTORIES.items() if isinstance(factory(Site(64, 2)), LinearMixer)]


@pytest.mark.parametrize("name", MATRICES)
def test_the_matrix_of_a_state_stays_where_it_is(name: str):
    mixer, x = FACTORIES[name](Site(64, 2, layer=1, num_layers=3)), torch.randn(2, 4, 64)
    with torch.no_grad():
        whole, _ = mixer(x)
        state = mixer.init_state(2)
        place, outputs = state.matrix.data_ptr(), []
        for t in range(4):
            y, state = mixer(x[:, t : t + 1], state)
            outputs.append(y)
            assert state.matrix.data_ptr() == place
    torch.testing.assert_close(torch.cat(outputs, 1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MATRICES)
def test_gradients_flow_through_steps(name: str):
    mixer, x = FACTORIES[name](Site(64, 2, layer=1, num_layers=3)).double(), torch.randn(2, 3, 64, dtype=torch.float64)
    state, outputs = mixer.init_state(2), []
    for t in range(3):
        y, state = mixer(x[:, t : t + 1], state)
        outputs.append(y)
    leaves = list(mixer.parameters())
    actual, expected = (torch.autograd.grad(y.square().sum(), leaves) for y in (torch.cat(outputs, 1), mixer(x)[0]))
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", FACTORIES)
def test_a_state_keeps_nothing_else_in_memory(name: str):
    """A view of the last tokens of a long prompt would keep all of it, in every layer."""
    mixer, x = FACTORIES[name](Site(64, 2, layer=1, num_layers=3)), torch.randn(2, 300, 64)
    with torch.no_grad():
        _, state = mixer(x, mixer.init_state(2))
    for tensor in tree_leaves(state):
        assert tensor.untyped_storage().nbytes() <= 2 * tensor.nbytes, tuple(tensor.shape)
