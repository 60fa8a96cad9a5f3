"""Where subheads are the same function as one long head, and where they are another."""

from functools import partial

import pytest
import torch

from mixers import (
    GLA,
    HGRN2,
    CosFormer2,
    DeltaNet,
    Expanded,
    Features,
    GatedDeltaNet,
    LinearAttention,
    LinearMixer,
    Mamba2,
    RetNet,
    Site,
)

SITE = Site(32, 2, layer=1, num_layers=3)
SAME = {
    "GLA": partial(GLA, expand_k=1),
    "GLA with convolutions": partial(GLA, qk=Features(4, activation="silu"), v=Features(4, activation="silu")),
    "HGRN2": HGRN2,
    "CosFormer2": CosFormer2,
    "LinearAttention": LinearAttention,
}


def both(factory, factor: int) -> tuple[LinearMixer, LinearMixer]:
    """With and without subheads, with the same weights."""
    cut, long = (Expanded(mixer=factory, factor=factor, subheads=s)(SITE).double() for s in (True, False))
    with torch.no_grad():
        for parameter in cut.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    shapes = {name: x.shape for name, x in long.state_dict().items()}
    long.load_state_dict({name: x.reshape(shapes[name]) for name, x in cut.state_dict().items()})  # LRPE's θ by head
    return cut, long


@pytest.mark.parametrize("factor", [2, 3])
@pytest.mark.parametrize("name", SAME)
def test_channels_that_go_their_own_way_do_not_know_of_subheads(name: str, factor: int):
    # the decay of GLA and HGRN2 belongs to a channel, and cosFormer2 has none: a sum over all channels either way
    cut, long = both(SAME[name], factor)
    cut.scale = long.scale = 0.4  # the longer key would have another one
    x = torch.randn(2, 70, 32, dtype=torch.float64)
    torch.testing.assert_close(cut(x)[0], long(x)[0])
    assert cut.state_size() == long.state_size()


@pytest.mark.parametrize("name", [name for name in SAME if name != "CosFormer2"])
def test_the_norm_removes_the_scale(name: str):
    cut, long = both(SAME[name], 3)
    x = torch.randn(2, 20, 32, dtype=torch.float64)
    assert not torch.equal(cut(x)[0], long(x)[0])  # its eps is left
    for mixer in (cut, long):
        (mixer.g_norm if isinstance(mixer, HGRN2) else mixer.o_norm).eps = 0
    torch.testing.assert_close(cut(x)[0], long(x)[0])


@pytest.mark.parametrize(
    "mixer", [GatedDeltaNet, DeltaNet, RetNet, Mamba2, partial(LinearAttention, qk=Features(norm="l2"))]
)
def test_gates_and_norms_per_subhead_are_another_function(mixer):
    x = torch.randn(1, 20, 32, dtype=torch.float64)
    with_subheads = Expanded(mixer=mixer, factor=2)(SITE).double()
    without = Expanded(mixer=mixer, factor=2, subheads=False)(SITE).double()
    # gates widen with subheads: what has no part in the other keeps its own values
    taken = {n: x for n, x in with_subheads.state_dict().items() if x.shape == without.state_dict()[n].shape}
    without.load_state_dict(taken, strict=False)
    if mixer is RetNet:
        assert len(taken) == len(with_subheads.state_dict())
    y, z = with_subheads(x)[0], without(x)[0]
    assert (y - z).norm() > 0.05 * y.norm()
