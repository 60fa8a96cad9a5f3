"""What HGRN1 and HGRN2 share: lower bounds of the forget gates, one matrix for all layers of a model."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import kernels
import mixers
import zoo
from mixers import HGRN1, HGRN2, Expanded, Site
from mixers.hgrn2 import LowerBounds
from zoo.lm.stack import H1, Stack, Uniform

MIXERS = {"HGRN1": HGRN1, "HGRN2": partial(HGRN2, head_dim=8)}
each_mixer = pytest.mark.parametrize("name", MIXERS)


def model(stack: Stack | str, num_layers: int = 4, **options: object) -> zoo.LanguageModel:
    stack = Uniform(MIXERS[stack]) if isinstance(stack, str) else stack
    return zoo.LanguageModel(stack, vocab_size=11, hidden_size=16, num_heads=2, num_layers=num_layers, **options)


def bounds(of: zoo.LanguageModel) -> list[LowerBounds]:
    assert of.mixers[0].lower_bounds is None  # the lowest layer is not bounded
    return [mixer.lower_bounds for mixer in of.mixers[1:]]


def assert_shared(of: zoo.LanguageModel) -> None:
    assert len({id(actual) for actual in bounds(of)}) == 1
    assert len([name for name, _ in of.named_parameters() if "lower_bounds" in name]) == 1


@each_mixer
def test_all_layers_share_one_matrix(name: str):
    actual = model(name)
    assert_shared(actual)
    assert bounds(actual)[0].weight.shape == (4, 16)
    separate = [MIXERS[name](Site(16, 2, layer, 4)) for layer in range(4)]
    once = sum(p.numel() for mixer in separate for p in mixer.parameters()) - 2 * 4 * 16
    assert sum(p.numel() for p in torch.nn.ModuleList(actual.mixers).parameters()) == once


@each_mixer
def test_they_stay_shared_from_the_meta_device(name: str):
    with torch.device("meta"):
        actual = model(name)
    actual.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in actual.parameters():
            parameter.fill_(torch.nan)
    actual.reset_parameters()
    assert_shared(actual)
    assert torch.equal(bounds(actual)[0].weight, torch.zeros(4, 16))
    assert actual(torch.zeros(1, 3, dtype=torch.int64))[0].isfinite().all()


@each_mixer
def test_they_stay_shared_in_a_copy(name: str):
    source = model(name)
    copied = copy.deepcopy(source)
    assert_shared(copied)
    with torch.no_grad():
        bounds(copied)[2].weight.fill_(1)
    assert (bounds(copied)[0].weight == 1).all()
    assert not bounds(source)[0].weight.any()


@pytest.mark.slow
@each_mixer
@pytest.mark.parametrize("assign", [False, True])
def test_they_stay_shared_through_a_state_dict(name: str, assign: bool):
    source, loaded = model(name, initializer_range=0.2), model(name)
    with torch.no_grad():
        bounds(source)[0].weight.normal_()
    loaded.load_state_dict(copy.deepcopy(source.state_dict()), assign=assign)
    assert_shared(loaded)
    assert torch.equal(bounds(loaded)[2].weight, bounds(source)[0].weight)
    tokens = torch.randint(11, (2, 9))
    assert torch.equal(loaded(tokens)[0], source(tokens)[0])


def lowest(bounds: LowerBounds, layer: int) -> torch.Tensor:
    """What is remembered at least: with a forget gate that wants to forget everything."""
    return kernels.forget_gate(torch.full((bounds.weight.shape[1],), -60.0), odds=bounds.odds(layer)).exp()


def test_bounds_rise_with_the_layer():
    actual = LowerBounds(5, 3)
    by_layer = torch.stack([lowest(actual, layer) for layer in range(5)])
    torch.testing.assert_close(by_layer, (torch.arange(5) / 5)[:, None].expand(5, 3))  # as they start
    with torch.no_grad():
        actual.weight.normal_(std=3)
    by_layer = torch.stack([lowest(actual, layer) for layer in range(5)])
    assert (by_layer.diff(dim=0) > 0).all()
    assert (by_layer < 1).all()
    share = actual.weight.softmax(0)
    torch.testing.assert_close(by_layer, share.cumsum(0) - share[:1])


@pytest.mark.parametrize("layers", [2, 5])
def test_bounds_can_start_higher(layers: int):
    actual = LowerBounds(layers, 3, high=0.98)
    by_layer = torch.stack([lowest(actual, layer) for layer in range(layers)])
    torch.testing.assert_close(by_layer, torch.linspace(0, 0.98, layers)[:, None].expand(layers, 3))


@pytest.mark.parametrize("layer", range(4))
@pytest.mark.parametrize("size", [0.0, 20.0, 200.0])
@pytest.mark.parametrize("row", range(4))
def test_gradients_are_finite_wherever_the_bounds_go(row: int, size: float, layer: int):
    # a bound so near to zero or one that fp32 has no number between
    actual, f = LowerBounds(4, 1), torch.tensor([[-200.0], [-3.0], [0.0], [3.0], [200.0]], requires_grad=True)
    with torch.no_grad():
        actual.weight[row] = size
    log_forget = kernels.forget_gate(f, odds=actual.odds(layer))
    assert log_forget.max() < 1e-6
    log_forget.sum().backward()
    assert f.grad.isfinite().all()
    assert actual.weight.grad is None if layer == 0 else actual.weight.grad.isfinite().all()


def test_a_gate_that_forgets_almost_nothing_writes_exactly_what_is_left():
    # 1 − σ(14) is 8·10⁻⁷: next to 1, fp32 has no more than 4 bits for it
    mixer, x = HGRN1(Site(8, 1), lower_bounds=None), torch.zeros(1, 1, 8)
    x[..., 0] = 1
    with torch.no_grad():
        mixer.in_proj.weight.zero_()
        mixer.in_proj.weight[:8, 0], mixer.in_proj.weight[8:16, 0] = 1, 14
    _, state = mixer(x, mixer.init_state(1))
    one = torch.ones((), dtype=torch.float64)
    expected = torch.sigmoid(-14 * one) * F.silu(one)
    torch.testing.assert_close(state.h.double(), expected.expand(1, 8, 1), rtol=1e-4, atol=0)


@each_mixer
def test_bounds_do_not_decay(name: str):
    assert LowerBounds.no_weight_decay == ("weight",)
    assert "lower_bounds.weight" in dict(MIXERS[name](Site(16, 2, 1, 3)).named_parameters())


@pytest.mark.slow
@each_mixer
def test_one_layer_has_nothing_to_bound(name: str):
    assert model(name, num_layers=1).mixers[0].lower_bounds is None
    plain = partial(MIXERS[name], lower_bounds=None)
    assert bounds(model(Uniform(plain))) == [None] * 3
    # … and then is the lowest layer of a deeper model
    lone, lowest = MIXERS[name](Site(16, 2)), MIXERS[name](Site(16, 2, 0, 4))
    lowest.load_state_dict(lone.state_dict(), strict=False)
    x = torch.randn(1, 9, 16)
    assert torch.equal(lone(x)[0], lowest(x)[0])


def test_different_expansions_have_bounds_of_their_own():
    wide = Expanded(mixer=MIXERS["HGRN2"], factor=2)
    actual = [mixer.lower_bounds for mixer in model(H1(MIXERS["HGRN2"], wide), num_layers=6).mixers]
    assert actual[2] is actual[4] is not None
    assert actual[1] is actual[3] is actual[5] is not None
    assert [b.weight.shape for b in actual[1:3]] == [(6, 32), (6, 16)]


def test_other_mixers_in_between_do_not_matter():
    actual = model(H1(mixers.GatedDeltaNet, MIXERS["HGRN2"])).mixers
    assert actual[1].lower_bounds is actual[3].lower_bounds


@pytest.mark.parametrize("layer", [0, 2])
def test_the_key_is_what_the_gate_forgets(layer: int):
    mixer = HGRN2(Site(16, 2, layer, 3), head_dim=8)
    s = mixer.gates(mixer.project(torch.randn(1, 5, 16)))
    torch.testing.assert_close(s.k, 1 - s.log_decay.exp())
    mixer = mixer.bfloat16()
    s = mixer.gates(mixer.project(torch.randn(1, 5, 16).bfloat16()))
    assert (s.k.dtype, s.log_decay.dtype) == (torch.bfloat16, torch.float32)


def test_without_bounds_the_gate_is_a_sigmoid():
    mixer = HGRN2(Site(16, 2, 1, 3), head_dim=8, lower_bounds=None)
    s = mixer.project(torch.randn(1, 5, 16))
    torch.testing.assert_close(mixer.gates(s).log_decay, F.logsigmoid(s.k))


def test_sizes():
    assert HGRN2(Site(256, 2)).key_size == 128  # the model's heads
    assert HGRN2(Site(256, 4), head_dim=32).num_heads == 8
    assert HGRN2(Site(2048, 8)).num_heads == 16  # of the paper's 128, whatever the model has
    assert HGRN2(Site(192, 3)).num_heads == 3
    assert HGRN1(Site(256, 4)).state_size() == 256


def test_forget_gates_and_values_can_have_convolutions():
    conv = mixers.Features(4, activation="silu")
    assert mixers.check_mixer(partial(HGRN2, head_dim=16, k=mixers.Features(4), v=conv), expanded=False)
    plain, both = HGRN2(Site(64, 4)), HGRN2(Site(64, 4), k=mixers.Features(4), v=conv)
    assert sum(p.numel() for p in both.parameters()) - sum(p.numel() for p in plain.parameters()) == 2 * 4 * 64
    with torch.no_grad():  # all that passes is the last token but one
        for features in (both.k_features, both.v_features):
            features.weight.zero_()[:, 0, -2] = 1
    x = torch.randn(1, 6, 64)
    state = both(x, both.init_state(1))[1].matrix
    x[:, -1] = 0  # which therefore does not matter
    torch.testing.assert_close(both(x, both.init_state(1))[1].matrix, state)
