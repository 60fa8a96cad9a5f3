import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import mixers
from mixers import GatedDeltaNet, Site
from mixers.base import Streams
from mixers.decay import Discretisation, Mamba2Discretisation

SITE = Site(hidden_size=64, num_heads=4)


@pytest.mark.parametrize(("decay", "low"), [(Discretisation, 1e-4), (Mamba2Discretisation, 1.0)])
def test_initial_ranges_are_reached(decay: type[Discretisation], low: float):
    """Of so many numbers the least and the largest are the ends; A starts uniform, dt log-uniform."""
    module = decay(100_000)
    A, dt = module.A_log.exp(), F.softplus(module.dt_bias)
    assert [A.min().item(), A.max().item()] == pytest.approx([low, 16], abs=2e-3)
    assert A.mean().item() == pytest.approx((low + 16) / 2, rel=0.01)
    assert [dt.min().item(), dt.max().item()] == pytest.approx([1e-3, 0.1], rel=1e-3)
    assert dt.log().mean().item() == pytest.approx(math.log(1e-2), rel=0.005)


def test_a_head_can_leave_the_smallest_rate():
    assert Discretisation(100, low=0.0, high=1e-9).A_log.exp().tolist() == pytest.approx([1e-4] * 100)


def test_sizes_default_to_the_models():
    mixer = GatedDeltaNet(SITE)
    assert (mixer.num_heads, mixer.num_key_heads, mixer.key_size, mixer.value_size) == (4, 4, 16, 16)
    assert mixer.state_size() == 4 * 16 * 16
    mixer = GatedDeltaNet(SITE, num_heads=6, num_key_heads=2, head_dim=8, value_dim=24)
    assert mixer.init_state(3).matrix.shape == (3, 6, 8, 24)
    assert mixer(torch.randn(2, 5, 64))[0].shape == (2, 5, 64)


@pytest.mark.parametrize("allow_neg_eigval", [False, True])
def test_gates(allow_neg_eigval: bool):
    mixer = GatedDeltaNet(SITE, allow_neg_eigval=allow_neg_eigval)
    raw = torch.linspace(-30, 30, 4 * 100).view(1, 100, 4)
    s = mixer.gates(Streams(raw, raw, raw, raw, raw))
    assert s.log_decay.max() <= 0
    top = 2.0 if allow_neg_eigval else 1.0
    assert (s.beta.min().item(), s.beta.max().item()) == pytest.approx((0, top), abs=1e-6)
    expected = -mixer.decay.A_log.exp() * F.softplus(raw + mixer.decay.dt_bias)
    torch.testing.assert_close(s.log_decay, expected)


@pytest.mark.parametrize("mixer", [GatedDeltaNet, mixers.DeltaNet])
def test_a_bias_of_beta(mixer):
    plain, biased = mixer(SITE), mixer(SITE, beta_bias=True)
    assert sum(p.numel() for p in biased.parameters()) - sum(p.numel() for p in plain.parameters()) == 4
    raw = torch.zeros(1, 3, 4)
    streams = Streams(raw, raw, raw, raw, raw)
    assert biased.gates(streams).beta.eq(0.5).all()
    with torch.no_grad():
        biased.beta.bias.copy_(torch.tensor([-50.0, 0.0, 1.0, 50.0]))
    torch.testing.assert_close(biased.gates(streams).beta, torch.tensor([0, 0.5, 0.7310586, 1]).expand(1, 3, 4))
    biased(torch.randn(1, 5, 64))[0].sum().backward()
    assert biased.beta.bias.grad.abs().max() > 0


def test_gates_are_made_in_fp32():
    # exp(A_log)·softplus of bf16 parameters: three digits of a decay that is raised to the length of the sequence
    mixer = GatedDeltaNet(SITE).bfloat16()
    s = mixer.gates(mixer.project(torch.randn(1, 5, 64).bfloat16()))
    assert s.log_decay.dtype == s.beta.dtype == torch.float32


def test_gates_do_not_decay():
    assert set(mixers.Discretisation.no_weight_decay) == {"A_log", "dt_bias"}


class Halved(mixers.Discretisation):
    """Decays by another formula."""

    def forward(self, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        log_decay, dt = super().forward(a)
        return log_decay / 2, dt


class OtherGates(GatedDeltaNet):
    def gates(self, s: Streams) -> Streams:
        s = super().gates(s)
        return s.replace(log_decay=s.log_decay / 2)


@pytest.mark.parametrize("make", [OtherGates, partial(GatedDeltaNet, decay=Halved)], ids=["gates", "decay"])
def test_gates_of_a_subclass_are_used(make: Callable[[Site], GatedDeltaNet]):
    plain, changed, x = GatedDeltaNet(SITE), make(SITE), torch.randn(2, 9, 64)
    changed.load_state_dict(plain.state_dict())
    assert not torch.allclose(changed(x)[0], plain(x)[0], atol=1e-4)
    with torch.no_grad():
        plain.decay.A_log -= math.log(2)
    torch.testing.assert_close(changed(x)[0], plain(x)[0])


def test_any_number_of_heads_with_a_head_size():
    assert GatedDeltaNet(SITE, num_heads=5, head_dim=8).state_size() == 5 * 8 * 8
