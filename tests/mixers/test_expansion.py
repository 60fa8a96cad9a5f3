from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
import mixers
from mixers import (
    DPFP,
    GLA,
    HGRN2,
    LFM,
    Expanded,
    Expansion,
    Features,
    GatedDeltaNet,
    HeadWise,
    LowRank,
    Mamba2,
    Site,
)
from mixers.base import LinearMixer
from mixers.contract import CLAUSES

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
    expanded = Expanded(mixer=MIXERS[name], factor=1, subheads=subheads)(SITE)
    assert type(expanded) is type(plain)
    assert expanded.state_dict().keys() == plain.state_dict().keys()
    x = torch.randn(1, 10, 64)
    assert torch.equal(expanded(x)[0], plain(x)[0])


def test_the_default_factor_is_one():
    assert Expanded(mixer=GatedDeltaNet)(SITE).state_size() == GatedDeltaNet(SITE).state_size()


@pytest.mark.parametrize("subheads", [True, False])
@pytest.mark.parametrize("factor", [2, 3, 8])
@pytest.mark.parametrize("name", MIXERS)
def test_the_state_is_factor_times_larger(name: str, factor: int, subheads: bool):
    plain, expanded = MIXERS[name](SITE), Expanded(mixer=MIXERS[name], factor=factor, subheads=subheads)(SITE)
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
    expanded = Expanded(mixer=MIXERS[name], factor=E, subheads=subheads)(SITE)
    G, K, H = plain.num_key_heads, plain.key_size, plain.num_heads
    actual = {n: tuple(p.shape) for n, p in expanded.state_dict().items()}
    wanted = {n: tuple(p.shape) for n, p in plain.state_dict().items()}
    wanted |= {"q_expand.weight": (G, K, E * K), "k_expand.weight": (G, K, E * K)}
    wanted |= {"q_features.weight": (G * E * K, 1, 4), "k_features.weight": (G * E * K, 1, 4)}
    if name == "Mamba2":
        wanted |= {"q_features.bias": (G * E * K,), "k_features.bias": (G * E * K,)}
    if subheads:
        gates = ["in_proj.dt.weight"] if name == "Mamba2" else ["in_proj.a.weight", "in_proj.b.weight"]
        wanted |= {gate: (H * E, 64) for gate in gates}
        wanted |= {"decay.A_log": (H * E,), "decay.dt_bias": (H * E,)}
    assert actual == wanted


@pytest.mark.parametrize("activation", ["silu", "relu", "elu1", "identity"])
def test_head_wise(activation: str):
    # equation 8: the activation comes before the expansion, and each head has a matrix of its own
    expansion = HeadWise(3, 4, 5, 12, activation=activation)
    x = torch.randn(2, 6, 3, 4)
    apply = {"silu": lambda x: x * x.sigmoid(), "relu": torch.relu, "identity": lambda x: x}
    apply["elu1"] = lambda x: torch.where(x > 0, x + 1, x.exp())
    y = expansion(x, torch.randn(2, 6, 12))
    assert y.shape == (2, 6, 3, 20)
    for head in range(3):
        torch.testing.assert_close(y[:, :, head], apply[activation](x[:, :, head]) @ expansion.weight[head])


def test_low_rank():
    heads, size, factor = 3, 8, 4
    expansion, x = LowRank(heads, size, factor, 12), torch.randn(2, 6, heads, size)
    y = expansion(x, torch.randn(2, 6, 12))
    wanted = torch.nn.functional.silu(x).reshape(12, 24) @ expansion.down @ expansion.up
    torch.testing.assert_close(y.reshape(12, -1), wanted)
    assert y.shape == (2, 6, heads, factor * size)


def test_initial_weights_keep_the_size_of_what_they_expand():
    heads, size, factor = 4, 64, 8
    head_wise, low_rank = (kind(heads, size, factor, 12) for kind in (HeadWise, LowRank))
    rank = round(factor * size / (factor + 1))
    for weight, inputs in ((head_wise.weight, size), (low_rank.down, heads * size), (low_rank.up, rank)):
        assert weight.std().item() == pytest.approx(inputs**-0.5, rel=0.03)
        assert abs(weight.mean().item()) < 0.03 * inputs**-0.5


def test_low_rank_has_the_parameters_of_head_wise():
    for heads, size, factor in ((8, 128, 8), (8, 256, 4), (3, 64, 2)):
        low, high = (sum(p.numel() for p in kind(heads, size, factor, 7).parameters()) for kind in (LowRank, HeadWise))
        assert abs(low - high) <= heads * size * (factor + 1) / 2  # the rank is rounded


def test_the_rank_can_be_chosen():
    assert LowRank(2, 8, 4, 12, rank=3).down.shape == (16, 3)


def test_dpfp():
    """Number j·2K + i is r_i · r_{i+j+1} with r = ReLU([x, −x]), indices modulo 2K."""
    K, E = 4, 6
    expansion, x = DPFP(1, K, E, 12), torch.randn(1, 1, 1, K)
    r = [max(value, 0.0) for value in (*x.flatten().tolist(), *(-x).flatten().tolist())]
    wanted = [r[i] * r[(i + j) % (2 * K)] for j in range(1, E // 2 + 1) for i in range(2 * K)]
    torch.testing.assert_close(expansion(x, torch.randn(1, 1, 12)).flatten(), torch.tensor(wanted))
    assert not list(expansion.parameters())


def test_lfm():
    expansion, stream, x = LFM(2, 4, 3, 12), torch.randn(1, 1, 2, 4), torch.randn(1, 1, 12)
    p = (expansion.p_proj.weight @ x.flatten()).relu().view(2, 3)
    for head in range(2):
        wanted = torch.outer(p[head], stream[0, 0, head].relu()).flatten()
        torch.testing.assert_close(expansion(stream, x)[0, 0, head], wanted)


@pytest.mark.slow
@pytest.mark.parametrize("subheads", [True, False])
@pytest.mark.parametrize("expansion", [LowRank, DPFP, LFM])
@pytest.mark.parametrize("name", MIXERS)
def test_every_expansion_keeps_the_contract(name: str, expansion: type[Expansion], subheads: bool):
    factory = Expanded(mixer=MIXERS[name], factor=2, subheads=subheads, expansion=expansion)
    assert len(mixers.check_mixer(factory)) == len(CLAUSES)


def test_an_expansion_by_a_user_with_parameters_in_fp32():
    class Scaled(Expansion):
        def __init__(self, heads: int, size: int, factor: int, hidden_size: int):
            super().__init__(heads, size, factor, hidden_size)
            self.scale = torch.nn.Parameter(torch.empty(factor, heads, size))
            self.reset_parameters()

        def reset_parameters(self) -> None:
            torch.nn.init.normal_(self.scale)

        def forward(self, stream: Tensor, x: Tensor) -> Tensor:
            return torch.cat([stream * scale for scale in self.scale], -1)

    mixers.check_mixer(Expanded(mixer=GatedDeltaNet, factor=2, expansion=Scaled))


@pytest.mark.parametrize(
    ("recompute", "kept"),
    [
        (True, (False, False, None)),
        ("queries", (False, True, None)),
        ("states", (True, True, None)),
        (False, (True, True, True)),
    ],
)
def test_which_streams_are_kept(recompute: Any, kept: tuple[bool, bool, bool | None]):
    built = Expanded(mixer=GatedDeltaNet, factor=2, recompute=recompute)(SITE)
    assert (built.q_features.kept, built.k_features.kept, built.keep_states) == kept


@pytest.mark.parametrize("expansion", [HeadWise, LowRank, LFM])
@pytest.mark.parametrize("mixer", [GatedDeltaNet, GLA, Mamba2])
def test_with_a_residual_it_starts_as_the_mixer_itself(mixer: type[mixers.LinearMixer], expansion: type[Expansion]):
    expanded = Expanded(mixer=mixer, factor=3, residual=True, expansion=expansion)(SITE)
    changed = [0.0] * 2
    for step in range(2):
        x = torch.randn(2, 30, 64)
        first = expanded(x)[0]
        with torch.no_grad():
            for parameter in (*expanded.q_expand.parameters(), *expanded.k_expand.parameters()):
                parameter.mul_(-2)
        changed[step] = float((expanded(x)[0] - first).detach().abs().max())
        torch.nn.init.ones_(expanded.q_gain.weight)
    assert changed[0] == 0  # whatever the others write, it is not read yet
    assert changed[1] > 0


def test_gains_stay_exact_and_do_not_decay():
    mixer = Expanded(mixer=GatedDeltaNet, factor=4, residual=True)(SITE).bfloat16()
    assert mixer.q_gain.weight.dtype == torch.float32
    assert mixer.q_gain.weight.shape == (2, 3)
    assert mixer.q_gain.no_weight_decay == ("weight",)
    assert mixer(torch.randn(1, 5, 64).bfloat16())[0].dtype == torch.bfloat16


class Keeping(torch.autograd.Function):
    """A recurrence that, as on a GPU, saves its arguments and nothing else."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v, log_decay)
        return v.clone()


def kept(mixer: Callable[[Site], LinearMixer], factor: int, patch: pytest.MonkeyPatch) -> float:
    """What a layer keeps for its backward pass, in numbers per number of its input."""
    made = Expanded(mixer=mixer, factor=factor)(Site(hidden_size=64, num_heads=2, layer=1, num_layers=2))
    patch.setattr(made, "recurrence", lambda q, k, v, *, log_decay, **_: (Keeping.apply(q, k, v, log_decay), None))
    x = torch.randn(1, 256, 64, requires_grad=True)
    with torch.profiler.profile(profile_memory=True) as profile, kernels.recomputing():
        y, _ = made(x)
    assert y.requires_grad
    return sum(event.self_cpu_memory_usage for event in profile.key_averages()) / x.nbytes


@pytest.mark.parametrize(
    "mixer", [partial(GLA, expand_k=1), partial(HGRN2, head_dim=32, q=Features()), partial(HGRN2, head_dim=32)]
)
def test_streams_and_gates_of_an_expansion_are_computed_again(
    mixer: Callable[[Site], LinearMixer], monkeypatch: pytest.MonkeyPatch
):
    more = kept(mixer, 8, monkeypatch) - kept(mixer, 2, monkeypatch)
    # on a CPU, an activation of the queries keeps its result; nothing else has the size of the state
    assert more < (1 + 6 if mixer.func is HGRN2 and "q" not in mixer.keywords else 1)


class Unfused(HeadWise):
    """An expansion of a plug-in that derives from HeadWise."""

    def forward(self, stream: Tensor, x: Tensor) -> Tensor:
        return super().forward(stream, x)


@pytest.mark.parametrize(
    ("qk", "expansion"),
    [
        (Features(), HeadWise),
        (Features(norm="l2"), HeadWise),
        (Features(conv=4, activation="silu"), HeadWise),
        (Features(), Unfused),
        (Features(norm="l2"), Unfused),
    ],
)
@pytest.mark.parametrize("recompute", [True, "queries", "states", False])
def test_named_streams_are_computed_again(
    recompute: Any, qk: Features, expansion: type[HeadWise], monkeypatch: pytest.MonkeyPatch
):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    build = Expanded(mixer=partial(GLA, qk=qk), factor=2, expansion=expansion, recompute=recompute)
    made, calls = build(SITE).to(device), []

    def recurrence(q: Tensor, k: Tensor, v: Tensor, *, log_decay: Tensor, **_: Any) -> tuple[Tensor, None]:
        o = Keeping.apply(q, k, v, log_decay)
        calls.append((q, k, o))
        return o, None

    monkeypatch.setattr(made, "recurrence", recurrence)
    with kernels.backend("triton"), kernels.recomputing():
        made(torch.randn(1, 16, 64, device=device))
        ((q, k, o),) = calls
        saved_q, saved_k, *_ = o.grad_fn.saved_tensors
    assert (saved_q.data_ptr() != q.data_ptr()) == (recompute in (True, "queries"))
    assert (saved_k.data_ptr() != k.data_ptr()) == (recompute is True)


@pytest.mark.parametrize("mixer", [GLA, partial(HGRN2, head_dim=32)])
def test_what_is_computed_again_has_the_same_gradients(mixer: Callable[[Site], LinearMixer]):
    made = Expanded(mixer=mixer, factor=3)(Site(hidden_size=64, num_heads=2, layer=1, num_layers=2))
    x = torch.randn(2, 70, 64, requires_grad=True)
    arguments = [x, *made.parameters()]
    actual = []
    for allowed in (False, True):
        with kernels.recomputing(allowed):
            y, _ = made(x)
        actual.append(torch.autograd.grad(y.square().sum(), arguments))
    assert all(torch.equal(repeated, saved) for repeated, saved in zip(*actual, strict=True))
