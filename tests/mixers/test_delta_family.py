"""The relatives of Gated DeltaNet: their gates, what they start with, and which of them are special cases of which."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mixers
from mixers import (
    GLA,
    KDA,
    BoundedChannelDecay,
    ChannelDecay,
    Comba,
    GatedDeltaNet,
    GatedDeltaNet2,
    GatedDeltaProduct,
    GatedRMSNorm,
    LinearMixer,
    Preconditioner,
    Site,
)

SITE = Site(hidden_size=32, num_heads=4)
SIZES = {"num_heads": 4, "num_key_heads": 2, "head_dim": 8, "value_dim": 12}
FAMILY = (KDA, GatedDeltaNet2, Comba, GatedDeltaProduct)


def test_the_first_decays_of_channels():
    decay = ChannelDecay(1000, 50)
    A, dt = decay.A_log.exp(), F.softplus(decay.dt_bias)
    assert [A.min().item(), A.max().item()] == pytest.approx([1, 16], rel=0.03)
    assert A.mean().item() == pytest.approx(8.5, rel=0.05)
    assert [dt.min().item(), dt.max().item()] == pytest.approx([1e-3, 0.1], rel=1e-2)
    assert dt.log().mean().item() == pytest.approx(math.log(1e-2), rel=0.01)


def test_the_decay_of_a_channel():
    decay, f = ChannelDecay(2, 3), torch.linspace(-40, 40, 30).view(1, 5, 6)
    expected = -decay.A_log.exp()[:, None] * F.softplus(f + decay.dt_bias).view(1, 5, 2, 3)
    torch.testing.assert_close(decay(f), expected)


def test_a_bounded_decay_is_a_sigmoid_and_not_a_clamp():
    decay = BoundedChannelDecay(2, 3, lower_bound=-4.0)
    assert not decay.A_log.any()
    with torch.no_grad():
        decay.A_log.copy_(torch.tensor([0.0, math.log(2)]))
        decay.dt_bias.fill_(0.25)
    log_decay = decay(torch.tensor([-100.0, -0.25, 0.75, -100.0, -0.25, 0.75]).view(1, 1, 6)).flatten()
    one, two = torch.tensor([1.0, 2.0]).sigmoid()
    expected = [0, -2, -4 * one, 0, -2, -4 * two]
    assert log_decay.tolist() == pytest.approx([float(x) for x in expected], abs=1e-6)
    assert decay(torch.full((1, 1, 6), 1e4)).tolist() == [[[[-4.0] * 3] * 2]]


@pytest.mark.parametrize("bound", [0.0, 1.0, math.nan, True, -math.inf])
def test_bounds_that_do_not_bound(bound: float):
    with pytest.raises(mixers.UserError, match=rf"^lower_bound: {bound} must be a finite number below 0$"):
        BoundedChannelDecay(2, 3, lower_bound=bound)


@pytest.mark.parametrize("make", FAMILY)
def test_gates_are_made_in_fp32(make: Callable[[Site], LinearMixer]):
    mixer = make(SITE).bfloat16()
    assert mixer.decay.A_log.dtype == mixer.decay.dt_bias.dtype == torch.float32
    assert set(mixer.decay.no_weight_decay) == {"A_log", "dt_bias"}
    seen = {}

    class Watched(type(mixer)):
        def readout(self, o, s):
            seen.update(s._asdict())
            return super().readout(o, s)

    watched = Watched(SITE).bfloat16()
    y, _ = watched(torch.randn(1, 5, 32).bfloat16())
    assert y.dtype == torch.bfloat16
    assert seen["log_decay"].dtype == torch.float32
    assert seen["q"].dtype == seen["k"].dtype == seen["v"].dtype == torch.bfloat16


def copied(mixer: LinearMixer, other: LinearMixer, **renamed: Tensor) -> None:
    """Give `mixer` the weights of the other by name, and those that are named here."""
    state = {name: x for name, x in other.state_dict().items() if name in mixer.state_dict()}
    mixer.load_state_dict(
        {**mixer.state_dict(), **state, **{name.replace("__", "."): x for name, x in renamed.items()}}
    )


def agree(one: LinearMixer, other: LinearMixer) -> None:
    x = torch.randn(2, 70, 32, dtype=torch.float64)
    torch.testing.assert_close(one.double()(x)[0], other.double()(x)[0])


def test_one_step_is_gated_deltanet():
    one = GatedDeltaProduct(SITE, **SIZES, num_steps=1, allow_neg_eigval=False)
    other = GatedDeltaNet(SITE, **SIZES)
    copied(one, other)
    agree(one, other)


def test_steps_with_strength_zero_are_gated_deltanet():
    three, other = GatedDeltaProduct(SITE, **SIZES, num_steps=3), GatedDeltaNet(SITE, **SIZES, allow_neg_eigval=True)
    copied(
        three,
        other,
        **{
            f"in_proj__{name}__weight": torch.cat([torch.randn_like(w), w, torch.randn_like(w)])
            for name in "kvb"
            for w in [other.state_dict()[f"in_proj.{name}.weight"]]
        },
        **{
            f"{name}_features__weight": torch.cat([w, w, w])
            for name in "kv"
            for w in [other.state_dict()[f"{name}_features.weight"]]
        },
    )

    class Idle(nn.Module):
        """The β of the second step alone."""

        def __init__(self, strength: nn.Module):
            super().__init__()
            self.strength = strength

        def forward(self, b: Tensor) -> Tensor:
            first, second, third = self.strength(b).chunk(3, -1)
            return torch.cat([0 * first, second, 0 * third], -1)

    three.beta = Idle(three.beta)
    agree(three, other)


def test_equal_decays_of_all_channels_are_gated_deltanet():
    kda, other = KDA(SITE, **SIZES, output=GatedRMSNorm, rank=12), GatedDeltaNet(SITE, **SIZES)
    low = torch.randn(12, 32) / 6
    up = torch.randn(4, 12) / 3
    gate_up = torch.randn(48, 12) / 3
    gate_down = torch.randn(12, 32) / 6
    copied(
        kda,
        other,
        in_proj__f__weight=low,
        decay_up__weight=up.repeat_interleave(8, 0),
        decay__A_log=other.decay.A_log.detach(),
        decay__dt_bias=other.decay.dt_bias.detach().repeat_interleave(8),
        in_proj__g__weight=gate_down,
        g_up__weight=gate_up,
        g_up__bias=torch.zeros(48),
    )
    copied(other, other, in_proj__a__weight=up @ low, in_proj__g__weight=gate_up @ gate_down)
    x = torch.randn(2, 70, 32)
    torch.testing.assert_close(kda(x)[0], other(x)[0], rtol=1e-4, atol=1e-5)


def test_equal_gates_of_all_channels_are_kda():
    sizes = {**SIZES, "num_key_heads": 4}
    both, other = GatedDeltaNet2(SITE, **sizes), KDA(SITE, **sizes)
    b = other.state_dict()["in_proj.b.weight"]
    copied(both, other, in_proj__b__weight=b.repeat_interleave(8, 0), in_proj__w__weight=b.repeat_interleave(12, 0))
    agree(both, other)


def by_hand(mixer: Comba, x: Tensor, *, unit: bool) -> Tensor:
    """The output of the recurrence of Comba, token by token, from the projections of its weights."""
    w = mixer.state_dict()

    def stream(name: str, heads: int) -> Tensor:
        y, taps = x @ w[f"in_proj.{name}.weight"].T, w[f"{name}_features.weight"]
        y = F.silu(F.conv1d(F.pad(y.mT, (3, 0)), taps, groups=y.shape[-1]).mT)
        return y.unflatten(-1, (heads, -1))

    q, k, v = stream("q", 2), stream("k", 2), stream("v", 4)
    f, D = w["feedback"].sigmoid()[:, None], w["D"][:, None]
    q, k = F.normalize(q - D * f * k, dim=-1), F.normalize(k, dim=-1)
    p = k if unit else f * k
    q, k, p = (y.repeat_interleave(2, 2) for y in (q, k, p))
    beta = (x @ w["in_proj.b.weight"].T).sigmoid()
    decay = (-w["decay.A_log"].exp() * F.softplus(x @ w["in_proj.a.weight"].T + w["decay.dt_bias"])).exp()
    S, outputs = x.new_zeros(len(x), 4, 8, 12), []
    for t in range(x.shape[1]):
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", S, p[:, t])  # the state before it decays
        S = decay[:, t, :, None, None] * S + beta[:, t, :, None, None] * k[:, t, :, :, None] * error[:, :, None]
        outputs.append(8**-0.5 * torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    gate = (x @ w["in_proj.g.weight"].T).sigmoid().unflatten(-1, (4, -1))
    o = torch.stack(outputs, 1)
    o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w["o_norm.norm.weight"] * gate
    return o.flatten(2) @ w["o_proj.weight"].T


@pytest.mark.parametrize("unit", [False, True])
def test_comba_reads_the_state_before_it_decays(unit: bool):
    mixer, x = Comba(SITE, **SIZES, unit_feedback=unit).double(), torch.randn(2, 70, 32, dtype=torch.float64)
    with torch.no_grad():
        mixer.feedback.copy_(torch.tensor([-1.0, 2.0]))
        mixer.D.copy_(torch.tensor([0.3, 1.5]))
        mixer.in_proj.weight.mul_(3)  # away from the eps of norms
    torch.testing.assert_close(mixer(x)[0], by_hand(mixer, x, unit=unit), rtol=1e-4, atol=1e-5)


def test_what_comba_starts_with():
    mixer = Comba(SITE)
    assert mixer.feedback.tolist() == mixer.D.tolist() == [1.0] * 4
    assert Comba(SITE, correction=0.02).D.tolist() == pytest.approx([0.02] * 4)
    assert Comba(SITE, correction=None).D is None


def test_a_feedback_without_effect():
    with pytest.raises(mixers.UserError, match=r"^correction: null needs unit_feedback=false, "):
        Comba(SITE, correction=None, unit_feedback=True)


def preconditioned_by_hand(mixer: LinearMixer, x: Tensor) -> Tensor:
    """The output of a preconditioned Gated DeltaNet or KDA before its norm and gate, token by token in fp64."""
    s, w, G = mixer.project(x), mixer.state_dict(), mixer.num_key_heads
    q, k, v = (
        F.silu(F.conv1d(F.pad(stream.flatten(2).mT, (3, 0)), w[f"{name}_features.weight"], groups=size).mT)
        for name, stream in zip("qkv", s[:3], strict=True)
        for size in [stream[0, 0].numel()]
    )
    q, k = (F.normalize(stream.unflatten(-1, (G, -1)), dim=-1) for stream in (q, k))
    v, beta = v.unflatten(-1, (4, -1)), mixer.beta(s.beta)
    if isinstance(mixer, KDA):
        decay = mixer.decay(mixer.decay_up(s.log_decay)).exp()
    else:
        decay = mixer.decay(s.log_decay)[0][..., None].exp()
    a, b = s.curvature
    forget = (-w["preconditioner.decay.A_log"].exp() * F.softplus(a + w["preconditioner.decay.dt_bias"])).exp()
    strength = b.sigmoid()
    A, S, outputs = x.new_zeros(len(x), G, 8), x.new_zeros(len(x), 4, 8, 12), []
    for t in range(x.shape[1]):
        A = forget[:, t, :, None] * A + strength[:, t, :, None] * k[:, t].square()
        r = (A + 1e-6).log() - w["preconditioner.centre"][:, None]
        written = k[:, t] * mixer.preconditioner.limit ** (-r / (1 + r.abs()))
        query, read, written = (y.repeat_interleave(4 // G, 1) for y in (q[:, t], k[:, t], written))
        S = decay[:, t, ..., None] * S
        error = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", S, read))
        S = S + torch.einsum("bhk,bhv->bhkv", written, error)
        outputs.append(8**-0.5 * torch.einsum("bhkv,bhk->bhv", S, query))
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("make", [KDA, GatedDeltaNet])
def test_a_preconditioner_changes_the_key_that_is_written_with(make: Callable[..., LinearMixer]):
    outputs = {}

    class Watched(make):
        def readout(self, o: Tensor, s):
            outputs["o"] = o
            return super().readout(o, s)

    mixer = Watched(SITE, **SIZES, preconditioner=partial(Preconditioner, limit=1.8)).double()
    with torch.no_grad():
        mixer.preconditioner.centre.copy_(torch.tensor([-3.0, -1.0]))
        mixer.in_proj.weight.mul_(3)
    x = torch.randn(2, 70, 32, dtype=torch.float64)
    mixer(x)
    torch.testing.assert_close(outputs["o"], preconditioned_by_hand(mixer, x), rtol=1e-4, atol=1e-5)


def test_what_a_preconditioner_starts_with():
    mixer = KDA(SITE, **SIZES, preconditioner=Preconditioner)
    assert mixer.preconditioner.centre.tolist() == pytest.approx([-0.2] * 2)
    assert mixer.state_size() == 4 * 8 * 12 + 2 * 8
    assert mixer.init_state(3).carried[0].shape == (3, 2, 1, 8)
    assert KDA(SITE, **SIZES).init_state(3).carried == ()


@pytest.mark.parametrize(("base", "steps"), [(GLA, 1), (KDA, 2)])
def test_recurrences_that_cannot_be_preconditioned(base: type[LinearMixer], steps: int):
    class Misfit(base):
        def __init__(self, site: Site):
            sizes = {"num_heads": 4, "key_size": 8, "value_size": 8, "steps": steps}
            LinearMixer.__init__(self, site, **sizes, preconditioner=Preconditioner)

    with pytest.raises(mixers.UserError, match=r"^preconditioner: only a delta rule with one step per token can"):
        Misfit(SITE)


@pytest.mark.parametrize("limit", [0.5, 1, 2.5, math.nan])
def test_limits_that_a_step_would_not_stay_stable_with(limit: float):
    with pytest.raises(mixers.UserError, match=rf"^limit: {limit} must be (a finite number|above 1 and at most 2)$"):
        Preconditioner(2, limit=limit)


@pytest.mark.parametrize("make", FAMILY)
def test_sizes_of_heads(make: Callable[..., LinearMixer]):
    assert make(SITE).state_size() == 4 * 8 * 8
    assert make(SITE, **SIZES).init_state(3).matrix.shape == (3, 4, 8, 12)
    with pytest.raises(mixers.UserError, match=r"^value_dim: 12 is given without head_dim"):
        make(SITE, value_dim=12)
    with pytest.raises(mixers.UserError, match=r"^num_key_heads: 3 does not divide the 4 \(value\) heads$"):
        make(SITE, num_key_heads=3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"full_rank_gate": True}, "gate_bias: True needs a gate of low rank; set it to false with full_rank_gate"),
        (
            {"full_rank_gate": True, "full_rank_decay": True, "gate_bias": False, "rank": 5},
            "rank: 5 has no effect where decay and gate have full rank; leave it out",
        ),
    ],
    ids=str,
)
def test_gates_of_full_rank_refuse_what_they_cannot_follow(arguments: dict[str, object], message: str):
    with pytest.raises(mixers.UserError, match=f"^{message}$"):
        KDA(SITE, **arguments)


@pytest.mark.parametrize("make", [*FAMILY, partial(KDA, preconditioner=Preconditioner)])
def test_residual_subheads_start_as_the_mixer_without_them(make: Callable[..., LinearMixer]):
    torch.manual_seed(1)
    plain = make(SITE, **SIZES).double()
    larger = mixers.Expanded(mixer=partial(make, **SIZES), factor=3, residual=True)(SITE).double()
    growth = next(growth for growth in mixers.growths(plain) if growth.way == "expand")
    fresh = larger.state_dict()
    for name, old in plain.state_dict().items():
        same = old.shape == fresh[name].shape
        fresh[name] = old if same else growth.resized(name, old, fresh[name], "preserve")
    larger.load_state_dict(fresh)
    x = torch.randn(2, 20, 32, dtype=torch.float64)
    torch.testing.assert_close(larger(x)[0], plain(x)[0])
