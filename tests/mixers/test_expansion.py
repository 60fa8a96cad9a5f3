from functools import partial

import pytest
import torch
from torch import Tensor

import mixers
from mixers import Expanded, Expansion, GatedDeltaNet, HeadWise, Mamba2, Site, SlidingWindowAttention

SITE = Site(hidden_size=64, num_heads=2)
MIXERS = {
    "GatedDeltaNet": GatedDeltaNet,
    "fewer key heads": partial(GatedDeltaNet, num_heads=4, num_key_heads=2, head_dim=16),
    "Mamba2": partial(Mamba2, head_dim=16, state_dim=32),
}


@pytest.mark.parametrize("subheads", [True, False])
@pytest.mark.parametrize("name", MIXERS)
def test_factor_one_is_the_mixer_itself(name: str, subheads: bool):
    torch.manual_seed(1)
    plain = MIXERS[name](SITE)
    torch.manual_seed(1)
    expanded = Expanded(SITE, mixer=MIXERS[name], factor=1, subheads=subheads)
    assert type(expanded) is type(plain)
    assert expanded.state_dict().keys() == plain.state_dict().keys()
    x = torch.randn(1, 10, 64)
    assert torch.equal(expanded(x)[0], plain(x)[0])


def test_the_default_factor_is_one():
    assert Expanded(SITE, mixer=GatedDeltaNet).state_size() == GatedDeltaNet(SITE).state_size()


@pytest.mark.parametrize("subheads", [True, False])
@pytest.mark.parametrize("factor", [2, 3, 8])
@pytest.mark.parametrize("name", MIXERS)
def test_the_state_is_factor_times_larger(name: str, factor: int, subheads: bool):
    plain, expanded = MIXERS[name](SITE), Expanded(SITE, mixer=MIXERS[name], factor=factor, subheads=subheads)
    assert expanded.state_size() == factor * plain.state_size()
    rows, heads, K, V = plain.init_state(1).matrix.shape
    wanted = (rows, heads * factor, K, V) if subheads else (rows, heads, factor * K, V)
    _, state = expanded(torch.randn(1, 3, 64), expanded.init_state(1))
    assert expanded.init_state(1).matrix.shape == state.matrix.shape == wanted


@pytest.mark.parametrize("subheads", [True, False])
@pytest.mark.parametrize("name", MIXERS)
def test_parameter_shapes(name: str, subheads: bool):
    """W [K,E·K] per key head for queries and keys; gates widen with subheads alone; values do not change."""
    E, plain = 4, MIXERS[name](SITE)
    expanded = Expanded(SITE, mixer=MIXERS[name], factor=E, subheads=subheads)
    G, K, H = plain.num_key_heads, plain.key_size, plain.num_heads
    found = {n: tuple(p.shape) for n, p in expanded.state_dict().items()}
    wanted = {n: tuple(p.shape) for n, p in plain.state_dict().items()}
    wanted |= {"q_expand.weight": (G, K, E * K), "k_expand.weight": (G, K, E * K)}
    wanted |= {"q_features.weight": (G * E * K, 1, 4), "k_features.weight": (G * E * K, 1, 4)}
    if name == "Mamba2":
        wanted |= {"q_features.bias": (G * E * K,), "k_features.bias": (G * E * K,)}
    if subheads:
        gates = ["in_proj.dt.weight"] if name == "Mamba2" else ["in_proj.a.weight", "in_proj.b.weight"]
        wanted |= {gate: (H * E, 64) for gate in gates}
        wanted |= {"decay.A_log": (H * E,), "decay.dt_bias": (H * E,)}
    assert found == wanted


@pytest.mark.parametrize("subheads", [True, False])
@pytest.mark.parametrize("name", MIXERS)
def test_token_by_token_is_the_whole(name: str, subheads: bool):
    mixer = Expanded(SITE, mixer=MIXERS[name], factor=3, subheads=subheads).double()
    x = torch.randn(2, 70, 64, dtype=torch.float64)
    y, _ = mixer(x)
    state, outputs = mixer.init_state(2), []
    for t in range(70):
        out, state = mixer(x[:, t : t + 1], state)
        outputs.append(out)
    torch.testing.assert_close(torch.cat(outputs, 1), y)


@pytest.mark.parametrize("activation", ["silu", "relu", "elu1", "identity"])
def test_head_wise(activation: str):
    # equation 8: the activation comes before the expansion, and each head has a matrix of its own
    expansion = HeadWise(3, 4, 5, activation=activation)
    x = torch.randn(2, 6, 3, 4)
    apply = {"silu": lambda x: x * x.sigmoid(), "relu": torch.relu, "identity": lambda x: x}
    apply["elu1"] = lambda x: torch.where(x > 0, x + 1, x.exp())
    y = expansion(x)
    assert y.shape == (2, 6, 3, 20)
    for head in range(3):
        torch.testing.assert_close(y[:, :, head], apply[activation](x[:, :, head]) @ expansion.weight[head])


def test_an_expansion_by_a_user():
    class Repeat(Expansion):
        def forward(self, x: Tensor) -> Tensor:
            return x.repeat_interleave(self.factor, -1)

    factory = partial(Expanded, mixer=GatedDeltaNet, factor=2, expansion=Repeat)
    mixers.check_mixer(factory)
    assert not [name for name, _ in factory(SITE).named_parameters() if "expand" in name]


def test_factors_below_one():
    with pytest.raises(mixers.UserError, match=r"^factor: 0 must be at least 1"):
        Expanded(SITE, mixer=GatedDeltaNet, factor=0)


@pytest.mark.parametrize("factor", [1, 2])
def test_expanded_inside_expanded(factor: int):
    inner = partial(Expanded, mixer=GatedDeltaNet, factor=factor)
    with pytest.raises(mixers.UserError, match=r"^mixer: an Expanded inside an Expanded"):
        Expanded(SITE, mixer=inner, factor=2)


@pytest.mark.parametrize("factor", [1, 2])
def test_attention_has_nothing_to_expand(factor: int):
    with pytest.raises(mixers.UserError, match=r"^mixer: SlidingWindowAttention has no matrix state"):
        Expanded(SITE, mixer=SlidingWindowAttention, factor=factor)
