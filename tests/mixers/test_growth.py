import math
from collections.abc import Callable
from functools import partial

import pytest
import torch

import mixers
from mixers import (
    GLA,
    HGRN2,
    KDA,
    Comba,
    ConstantDecay,
    Expanded,
    GatedDeltaNet,
    GatedDeltaNet2,
    GatedDeltaProduct,
    Growth,
    LinearMixer,
    Mamba2,
    Preconditioner,
    RetNet,
    Site,
    SlidingWindowAttention,
    growths,
)
from mixers.contract import CLAUSES

from .variants import PRECONDITIONED, REGISTERED

SITE = Site(hidden_size=64, num_heads=4)
MIXERS = {
    "GLA": GLA,
    "HGRN2": partial(HGRN2, head_dim=16),
    "GatedDeltaNet": GatedDeltaNet,
    "fewer key heads": partial(GatedDeltaNet, num_heads=4, num_key_heads=2, head_dim=16),
    "KDA": KDA,
    "KDA, decay of full rank": partial(KDA, full_rank_decay=True, rank=5),
    "KDA, full rank": partial(KDA, full_rank_decay=True, full_rank_gate=True, gate_bias=False),
    "GatedDeltaNet2": GatedDeltaNet2,
    "GatedDeltaNet2, fewer key heads": partial(GatedDeltaNet2, num_heads=4, num_key_heads=2, head_dim=16),
    "KDA, preconditioned": PRECONDITIONED["KDA, preconditioned"],
    "Comba": partial(Comba, num_heads=4, num_key_heads=2, head_dim=16),
    "GatedDeltaProduct": partial(GatedDeltaProduct, num_heads=4, num_key_heads=2, head_dim=16),
    "Mamba2": partial(Mamba2, head_dim=16, state_dim=8, num_groups=2),
    "RetNet": RetNet,
}
LINEAR = {name: factory for name, factory in REGISTERED.items() if isinstance(factory(SITE), LinearMixer)}
# constant decays depend on the number of subheads; those of RetNet keep the values of the first subheads
PRESERVED = MIXERS | {
    name: factory
    for name, factory in LINEAR.items()
    if not any(isinstance(part, ConstantDecay) for part in factory(SITE).modules())
}


@pytest.mark.parametrize("factor", [2, None])
@pytest.mark.parametrize("name", LINEAR | MIXERS)
def test_the_arguments_of_each_way_make_the_state_so_many_times_larger(name: str, factor: int | None):
    factory = (LINEAR | MIXERS)[name]
    before = factory(SITE)
    for growth in growths(before):
        times = factor or growth.default_factor()
        arguments = growth.arguments(times, "reinit")
        larger = growth.around(mixer=factory, **arguments) if growth.around else partial(factory, **arguments)
        after = larger(SITE)
        sizes = [math.prod(mixer.init_state(1).matrix.shape) for mixer in (before, after)]
        assert sizes[1] == times * sizes[0]
        fresh = after.state_dict()
        for part, old in before.state_dict().items():
            if old.shape != fresh[part].shape:
                assert growth.resized(part, old, fresh[part], "inherit").shape == fresh[part].shape


def test_the_ways_of_mixers():
    ways = {name: [growth.way for growth in growths(factory(SITE))] for name, factory in (LINEAR | MIXERS).items()}
    assert all("expand" in each for each in ways.values())
    assert {name: each for name, each in ways.items() if len(each) > 1} == {
        "GLA": ["merge", "expand"],
        "HGRN2": ["merge", "expand"],
        "GatedDeltaNet": ["merge", "expand"],
        "fewer key heads": ["merge", "expand"],
        "KDA": ["merge", "expand"],
        "KDA, decay of full rank": ["merge", "expand"],
        "KDA, full rank": ["merge", "expand"],
        "KDA, preconditioned": ["merge", "expand"],
        "GatedDeltaNet2": ["merge", "expand"],
        "GatedDeltaNet2, fewer key heads": ["merge", "expand"],
        "Comba": ["merge", "expand"],
        "GatedDeltaProduct": ["merge", "expand"],
        "Mamba2": ["widen", "expand"],
    }
    assert growths(SlidingWindowAttention(SITE)) == growths(Expanded(mixer=GLA, factor=2)(SITE)) == []


SHARED = {"num_heads": 4, "num_key_heads": 2, "head_dim": 8, "value_dim": 12}
FAMILY = (KDA, GatedDeltaNet2, Comba, GatedDeltaProduct, PRECONDITIONED["KDA, preconditioned"])


@torch.no_grad()
@pytest.mark.parametrize(
    ("factory", "factor"),
    [(factory, 2) for factory in PRESERVED.values()] + [(partial(factory, **SHARED), 3) for factory in FAMILY],
    ids=[*PRESERVED, *(f"shared keys {number}" for number in range(len(FAMILY)))],
)
def test_preserved_subheads_compute_what_the_heads_did(factory: Callable[[Site], LinearMixer], factor: int):
    before = factory(SITE).double()
    for parameter in before.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    growth = growths(before)[-1]
    after = Expanded(mixer=factory, **growth.arguments(factor, "preserve"))(SITE).double()
    fresh = after.state_dict()
    for part, old in before.state_dict().items():
        same = old.shape == fresh[part].shape
        fresh[part] = old if same else growth.resized(part, old, fresh[part], "preserve")
    after.load_state_dict(fresh)
    x = torch.randn(2, 21, SITE.hidden_size, dtype=torch.float64)
    torch.testing.assert_close(after(x)[0], before(x)[0])


def test_new_rows_of_mamba2_follow_the_old_ones_of_their_group():
    (wider, _) = growths(Mamba2(SITE, head_dim=16, state_dim=3, num_groups=2))
    old, fresh = torch.arange(6.0)[:, None], -torch.ones(12, 1)
    inherited = wider.resized("in_proj.C.weight", old, fresh, "inherit")
    assert inherited.flatten().tolist() == [0, 1, 2, -1, -1, -1, 3, 4, 5, -1, -1, -1]
    silent = wider.resized("in_proj.C.weight", old, fresh, "preserve")
    assert silent.flatten().tolist() == [0, 1, 2, 0, 0, 0, 3, 4, 5, 0, 0, 0]
    assert torch.equal(wider.resized("in_proj.B.weight", old, fresh, "preserve"), inherited)


def test_merged_gates_are_means_and_merged_norms_are_repeated():
    (merged, _) = growths(GatedDeltaNet(SITE))
    assert merged.resized("decay.A_log", torch.arange(4.0), torch.empty(2), "inherit").tolist() == [0.5, 2.5]
    assert merged.resized("o_norm.weight", torch.arange(2.0), torch.empty(4), "inherit").tolist() == [0, 1, 0, 1]


def test_subheads_start_with_the_gates_of_their_head():
    growth = growths(GatedDeltaNet(SITE, num_heads=2, num_key_heads=1, head_dim=3))[-1]
    assert growth.resized("decay.A_log", torch.tensor([1.0, 2.0]), torch.empty(4), "inherit").tolist() == [1, 1, 2, 2]
    channels = growth.resized("q_features.bias", torch.arange(3.0), torch.empty(6), "inherit")
    assert channels.tolist() == [0, 1, 2, 0, 1, 2]


def test_subheads_of_several_steps_and_of_key_heads():
    growth = growths(GatedDeltaProduct(SITE, num_heads=2, num_key_heads=1, head_dim=3))[-1]
    strengths = growth.resized("in_proj.b.weight", torch.arange(4.0)[:, None], torch.empty(8, 1), "inherit")
    assert strengths.flatten().tolist() == [0, 0, 1, 1, 2, 2, 3, 3]  # by step, then by head
    keys = growth.resized("k_features.bias", torch.arange(6.0), torch.empty(12), "inherit")
    assert keys.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5]
    growth = growths(GatedDeltaNet2(SITE, num_heads=2, num_key_heads=1, head_dim=3))[-1]
    assert growth.resized("in_proj.b.weight", torch.arange(3.0), torch.empty(6), "inherit").tolist() == [0, 1, 2] * 2
    growth = growths(KDA(SITE, num_heads=4, num_key_heads=2, head_dim=3, preconditioner=Preconditioner))[-1]
    for name in ("preconditioner.centre", "preconditioner.decay.A_log", "in_proj.curvature_b.weight"):
        assert growth.resized(name, torch.arange(2.0), torch.empty(4), "inherit").tolist() == [0, 0, 1, 1]
    growth = growths(Comba(SITE, num_heads=4, num_key_heads=2, head_dim=3))[-1]
    assert growth.resized("feedback", torch.arange(2.0), torch.empty(4), "inherit").tolist() == [0, 0, 1, 1]


def test_merged_channels_keep_their_decays():
    mixer = KDA(SITE)
    (merged, _) = growths(mixer)
    larger = KDA(SITE, **merged.arguments(2, "inherit"))
    assert larger.decay_up.weight.shape == mixer.decay_up.weight.shape
    assert larger.decay.A_log.shape == (2,)


def test_a_mixer_of_ones_own_says_how_it_grows():
    class Mine(GLA):
        pass

    class Widened(Growth):
        grows, way = Mine, "double keys"

        def arguments(self, factor: int, init: str) -> dict[str, object]:
            return {"expand_k": self.mixer.key_size * self.mixer.num_heads * factor / self.mixer.site.hidden_size}

    assert [growth.way for growth in growths(Mine(SITE))] == ["double keys", "merge", "expand"]
    assert [growth.way for growth in growths(GLA(SITE))] == ["merge", "expand"]
    assert Mine(SITE, **growths(Mine(SITE))[0].arguments(2, "reinit")).state_size() == 2 * Mine(SITE).state_size()


@pytest.mark.slow
@pytest.mark.parametrize("name", LINEAR | MIXERS)
def test_residual_subheads_keep_the_contract(name: str):
    factory = Expanded(mixer=(LINEAR | MIXERS)[name], factor=3, residual=True)
    places = 2 if factory(SITE).passes else 1  # alone, and above another
    assert len(mixers.check_mixer(factory)) == places * len(CLAUSES)
