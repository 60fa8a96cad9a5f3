"""Numbers that make no sense end in one sentence: those of every constructor, and of sequences, batches and states."""

import inspect
import math
from typing import Any

import pytest
import torch
from torch import nn

import kernels
import mixers
from mixers.decay import ConstantDecay

from ..constructors import named, refuses, wrong

SITE = mixers.Site(hidden_size=64, num_heads=2, layer=1, num_layers=3)
PUBLIC = {each for each in vars(mixers).values() if isinstance(each, type)}
# what mixers are, and what their arguments name; other modules get their sizes from these
MADE = sorted(
    {mixers.get(name) for name in mixers.names()}
    | {each for each in PUBLIC if issubclass(each, nn.Module) and each.__module__.startswith("mixers.")}
    - {mixers.KeepsFp32, mixers.TokenMixer, mixers.Norm, mixers.Output, mixers.Projection, mixers.OutputProjection}
    | {mixers.Features, mixers.Expanded},
    key=lambda each: each.__name__,
)
GIVEN: dict[str, Any] = {
    "site": SITE,
    "mixer": mixers.GLA,
    "heads": 2,
    "size": 8,
    "original_length": 16,
    "factor": 2,
    "hidden_size": 64,
    "num_layers": 3,
    "num_heads": 2,
    "key_size": 8,
    "value_size": 8,
    "count": 2,
    "log_decay": [-1.0],
}
ALLOWED = {
    "conv": (0,),  # none
    "Expansion.hidden_size": (0,),  # of an expansion that makes nothing of the layer's input
    **{f"{name}.hidden_size": (0,) for name in ("HeadWise", "LowRank", "DPFP", "LFM")},
}


# a number may be negative if its default is
ALLOWED |= {
    f"{cls.__name__}.{name}": (-1.0,)
    for cls in MADE
    for name, parameter in inspect.signature(cls).parameters.items()
    if type(parameter.default) is float and parameter.default < 0
}


@pytest.mark.slow
@pytest.mark.parametrize(("cls", "name", "value"), [*wrong(MADE, ALLOWED)], ids=named)
def test_wrong_numbers(cls: type, name: str, value: Any):
    refuses(cls, name, value, GIVEN)


def test_every_registered_mixer_is_among_them():
    cases = {cls.__name__ for cls, _, _ in wrong(MADE, ALLOWED)}
    without_numbers = {"Bidirectional"}
    assert set(mixers.names()) - without_numbers <= cases
    assert {"Expanded", "HeadWise", "LowRank", "DPFP", "LFM", "TPE", "RMSNorm", "LowerBounds", "Rotary"} <= cases


def test_constant_decays_at_their_ends():
    assert ConstantDecay([-math.inf, 0.0]).log_decay == (-math.inf, 0.0)


@pytest.fixture(params=mixers.names())
def mixer(request: pytest.FixtureRequest) -> mixers.TokenMixer:
    entry = mixers.entry(request.param)
    return entry.mixer(SITE, **entry.tiny)


@pytest.mark.parametrize("states", [1, 2, 4])
def test_a_state_of_other_sequences_than_there_are_documents(mixer: mixers.TokenMixer, states: int):
    if not mixer.causal:
        pytest.skip("has no state")
    message = rf"^(state: has {states} sequences|history: expected \[3,|initial_state: expected \(3,)"
    with pytest.raises(ValueError, match=message):
        mixer(torch.randn(1, 9, 64), mixer.init_state(states), cu_seqlens=torch.tensor([0, 2, 5, 9]))


def test_a_state_of_other_sequences_than_there_are_rows(mixer: mixers.TokenMixer):
    if not mixer.causal:
        pytest.skip("has no state")
    with pytest.raises(
        ValueError, match=r"^(state: has 3 sequences|history: expected \[2,|initial_state: expected \(2,)"
    ):
        mixer(torch.randn(2, 4, 64), mixer.init_state(3))


@pytest.mark.parametrize("state", [False, True])
def test_no_tokens(mixer: mixers.TokenMixer, state: bool):
    if state and not mixer.causal:
        pytest.skip("has no state")
    with pytest.raises(ValueError, match=r"^[xq]: .*(at least one token|with T ≥ 1)"):
        mixer(torch.randn(2, 0, 64), mixer.init_state(2) if state else None)


@pytest.mark.parametrize("length", [1, 5])
def test_no_rows(mixer: mixers.TokenMixer, length: int):
    """An empty batch gives an empty output, and a gradient of zero."""
    x = torch.randn(0, length, 64)
    y, _ = mixer(x)
    assert y.shape == x.shape
    parameters = list(mixer.parameters())
    gradients = torch.autograd.grad(y.sum(), parameters, materialize_grads=True)
    assert not any(g.any() for g in gradients)
    if mixer.causal:
        y, state = mixer(x, mixer.init_state(0))
        assert y.shape == x.shape
        assert state is not None


@pytest.mark.parametrize("name", mixers.names())
def test_a_site_that_is_none_and_an_input_of_another_shape(name: str):
    example = "mixers.Site(hidden_size=512, num_heads=8)"
    with pytest.raises(kernels.UserError) as error:
        mixers.get(name)(512)
    assert str(error.value) == f"site: {name} takes a mixers.Site, such as {example}, not 512"
    for sizes, others in (((), {"hidden_size": 64, "num_heads": 2}), ((64, 2), {})):
        with pytest.raises(kernels.UserError) as error:
            mixers.get(name)(*sizes, **others)
        assert str(error.value) == f"site: {name} takes a mixers.Site, such as {example}, not its sizes"
    mixer = mixers.get(name)(SITE)
    for shape in ((3, 64), (1, 3, 32), (1, 2, 3, 64)):
        with pytest.raises(kernels.UserError) as error:
            mixer(torch.zeros(shape))
        assert str(error.value) == f"x: must be [batch, time, 64], got shape {shape}"


@pytest.mark.parametrize("mixer", ["GLA", "Mamba2", "SoftmaxAttention"])
def test_numbers_beyond_what_a_machine_holds(mixer: str):
    with pytest.raises(mixers.UserError, match=r"^\w+: 1000+ must be at most 2147483647$"):
        mixers.get(mixer)(SITE, **{"num_groups" if mixer == "Mamba2" else "num_heads": 10**30})
    with pytest.raises(mixers.UserError, match=r"^eps: 1000+ must be a finite number that is not below 0$"):
        mixers.RMSNorm(8, 10**400)
