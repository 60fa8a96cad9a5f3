"""Fused kernels stand in for a method only where a class says so."""

import pytest
import torch
from torch import Tensor

from mixers import KDA, Discretisation, GatedDeltaNet, GatedRMSNorm, HeadWise, Mamba2Discretisation, Site
from mixers.base import Streams
from mixers.decay import BoundedChannelDecay, ChannelDecay
from mixers.fusion import Fusable


class Doubled(HeadWise):
    def forward(self, stream: Tensor, x: Tensor) -> Tensor:
        return 2 * super().forward(stream, x)


class DoubledAgain(Doubled):
    """Overrides nothing itself."""


class Renamed(HeadWise):
    """Computes what its base class does."""

    fused = True

    def forward(self, stream: Tensor, x: Tensor) -> Tensor:
        return super().forward(stream, x)


class OwnGates(GatedDeltaNet):
    def gates(self, s: Streams) -> Streams:
        return super().gates(s)


class OwnKDAGates(KDA):
    def gates(self, s: Streams) -> Streams:
        return super().gates(s)


class OwnChannelDecay(BoundedChannelDecay):
    def forward(self, f: Tensor) -> Tensor:
        return super().forward(f)


class OwnReadout(GatedDeltaNet):
    def readout(self, o: Tensor, s: Streams) -> Tensor:
        return super().readout(o, s)


@pytest.mark.parametrize(
    ("cls", "fused"),
    [
        *((cls, True) for cls in (HeadWise, Discretisation, Mamba2Discretisation, GatedDeltaNet, Renamed, OwnReadout)),
        *((cls, True) for cls in (KDA, ChannelDecay, BoundedChannelDecay)),
        *((cls, False) for cls in (Doubled, DoubledAgain, OwnGates, OwnKDAGates, OwnChannelDecay)),
    ],
)
def test_a_class_that_overrides_the_method_is_not_fused(cls: type[Fusable], fused: bool):
    assert cls.fused is fused


def test_factors_are_the_expansion():
    """With a product where it is fused, and without one where a subclass computes something else."""
    stream, x = torch.randn(2, 5, 3, 4), torch.randn(2, 5, 12)
    plain, doubled = HeadWise(3, 4, 2, 12), Doubled(3, 4, 2, 12)
    doubled.load_state_dict(plain.state_dict())
    factors = plain.factors(stream, x)
    assert factors[0] is stream
    assert factors[1] == (plain.weight, "silu")
    y, product = doubled.factors(stream, x)
    assert product is None
    torch.testing.assert_close(y, 2 * plain(stream, x))


@pytest.mark.parametrize("full_rank_decay", [False, True])
@pytest.mark.parametrize("decay", [ChannelDecay, BoundedChannelDecay])
def test_gates_of_kda_are_the_same_where_they_are_not_fused(decay: type[ChannelDecay], full_rank_decay: bool):
    site, x = Site(hidden_size=32, num_heads=2), torch.randn(2, 70, 32)
    fused, own = (cls(site, decay=decay, full_rank_decay=full_rank_decay) for cls in (KDA, OwnKDAGates))
    own.load_state_dict(fused.state_dict())
    assert fused.gate_inputs(fused.project(x)) is not None
    assert own.gate_inputs(own.project(x)) is None
    torch.testing.assert_close(own(x)[0], fused(x)[0])
    assert KDA(site, decay=OwnChannelDecay).gate_inputs(fused.project(x)) is None


def test_own_gates_are_called():
    site = Site(hidden_size=32, num_heads=2)
    s = GatedDeltaNet(site).project(torch.randn(1, 3, 32))
    assert GatedDeltaNet(site).gate_inputs(s) is not None
    assert OwnGates(site).gate_inputs(s) is None


class DoubledReadout(GatedDeltaNet):
    def readout(self, o: Tensor, s: Streams) -> Tensor:
        return 2 * super().readout(o, s)


class DoubledNorm(GatedRMSNorm):
    def forward(self, o: Tensor, gate: Tensor | None) -> Tensor:
        return 2 * super().forward(o, gate)


@pytest.mark.parametrize(
    ("cls", "fused"), [(GatedDeltaNet, True), (OwnReadout, False), (OwnGates, False), (DoubledReadout, False)]
)
def test_a_token_is_fused_only_where_its_methods_are_not_overridden(cls: type[Fusable], fused: bool):
    assert cls.fused_token is fused


@pytest.mark.parametrize(("cls", "output"), [(DoubledReadout, GatedRMSNorm), (GatedDeltaNet, DoubledNorm)])
@torch.no_grad()
def test_own_readouts_and_norms_are_called_for_a_token(cls: type[GatedDeltaNet], output: type[GatedRMSNorm]):
    site, x = Site(hidden_size=32, num_heads=2), torch.randn(2, 1, 32)
    plain, own = GatedDeltaNet(site), cls(site, output=output)
    own.load_state_dict(plain.state_dict())
    torch.testing.assert_close(own(x, own.init_state(2))[0], 2 * plain(x, plain.init_state(2))[0])
