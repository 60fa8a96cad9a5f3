"""One mixer each way."""

from functools import partial

import pytest
import torch

import mixers
from kernels import UserError
from mixers import HGRN2, Bidirectional, Expanded, GatedDeltaNet, Site, SoftmaxAttention

SITE = Site(64, 2, layer=1, num_layers=3)


@torch.no_grad()
def test_it_is_the_sum_of_both_ways():
    mixer, x = Bidirectional(SITE, mixer=GatedDeltaNet), torch.randn(2, 13, 64)
    expected = mixer.forwards(x)[0] + mixer.backwards(x.flip(1))[0].flip(1)
    torch.testing.assert_close(mixer(x)[0], expected)
    # read backwards by a mixer with its halves swapped, a sequence gives the same outputs backwards
    mixer.forwards, mixer.backwards = mixer.backwards, mixer.forwards
    torch.testing.assert_close(mixer(x.flip(1))[0].flip(1), expected)


def test_its_costs_are_those_of_both():
    one, both = GatedDeltaNet(SITE), Bidirectional(SITE, mixer=GatedDeltaNet)
    assert both.state_size() == 2 * one.state_size()
    assert both.flops(100) == 2 * one.flops(100)
    assert sum(p.numel() for p in both.parameters()) == 2 * sum(p.numel() for p in one.parameters())
    assert not Bidirectional(SITE, mixer=SoftmaxAttention).constant_state


def test_each_direction_shares_its_lower_bounds():
    layers = [Bidirectional(Site(64, 2, layer, 3), mixer=HGRN2) for layer in range(3)]
    for layer, mixer in enumerate(layers):
        mixer.share(layers[:layer])
    assert layers[2].forwards.lower_bounds is layers[1].forwards.lower_bounds
    assert layers[2].backwards.lower_bounds is layers[1].backwards.lower_bounds
    assert layers[2].forwards.lower_bounds is not layers[2].backwards.lower_bounds


def test_there_is_no_state():
    mixer = Bidirectional(SITE)
    message = "^state: Bidirectional needs whole sequences, so there is no state to continue from$"
    with pytest.raises(UserError, match=message):
        mixer.init_state(1)
    with pytest.raises(UserError, match=message):
        mixer(torch.zeros(1, 3, 64), HGRN2(SITE).init_state(1))


def test_expansion_and_parts_of_sequences():
    expanded = Bidirectional(SITE, mixer=Expanded(mixer=GatedDeltaNet, factor=4))
    assert expanded.state_size() == 4 * Bidirectional(SITE, mixer=GatedDeltaNet).state_size()
    with pytest.raises(UserError, match="Bidirectional has no matrix state to expand"):
        Expanded(mixer=Bidirectional, factor=4)(SITE)
    assert not mixers.takes_context_parallel(Bidirectional)


@pytest.mark.parametrize("inner", [SoftmaxAttention, Expanded(mixer=GatedDeltaNet, factor=2)])
def test_it_keeps_the_contract_around_other_mixers(inner):
    passed = mixers.check_mixer(partial(Bidirectional, mixer=inner))
    assert "mixes both ways" in passed
    assert "causality" not in passed
