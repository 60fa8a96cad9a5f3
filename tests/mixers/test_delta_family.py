"""The relatives of Gated DeltaNet: their gates, what they start with, and which of them are special cases of which."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import mixers
from mixers import (
    GLA,
    KDA,
    BoundedChannelDecay,
    ChannelDecay,
    Comba,
    GatedDeltaNet2,
    GatedDeltaProduct,
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


def test_what_comba_starts_with():
    mixer = Comba(SITE)
    assert mixer.feedback.tolist() == mixer.D.tolist() == [1.0] * 4
    assert Comba(SITE, correction=0.02).D.tolist() == pytest.approx([0.02] * 4)
    assert Comba(SITE, correction=None).D is None


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


@pytest.mark.parametrize("make", FAMILY)
def test_sizes_of_heads(make: Callable[..., LinearMixer]):
    assert make(SITE).state_size() == 4 * 8 * 8
    assert make(SITE, **SIZES).init_state(3).matrix.shape == (3, 4, 8, 12)
