"""Fused kernels stand in for a method only where a class says so."""

import copy
import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kernels
from mixers import (
    HGRN2,
    KDA,
    MLSTM,
    DeltaNet,
    Discretisation,
    Features,
    GatedDeltaNet,
    GatedDeltaProduct,
    GatedRMSNorm,
    HeadWise,
    LinearMixer,
    Mamba2,
    Mamba2Discretisation,
    Mamba3,
    NormOnly,
    RetNet,
    Rotary,
    Site,
    YarnRotary,
)
from mixers.base import Streams
from mixers.decay import BoundedChannelDecay, ChannelDecay, Strength, Trapezoid
from mixers.fusion import Fusable
from mixers.hgrn2 import LowerBounds
from mixers.mlstm import CappedGates
from mixers.norm import HeadLayerNorm, Output, SigmoidGatedRMSNorm, ZeroCentredRMSNorm

from .variants import CAUSAL, Factory

# mixers with a token in one launch
FUSED_TOKENS = (
    *("Comba", "CosFormer2", "DeltaNet", "GLA", "GatedDeltaNet", "GatedDeltaNet2", "GatedDeltaProduct", "HGRN2", "KDA"),
    *("LinearAttention", "Mamba2", "MLSTM", "Mamba3", "RetNet", "TNL"),
)


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


class Doubles:
    """A mix-in of norms."""

    def forward(self, o: Tensor, gate: Tensor | None) -> Tensor:
        return 2 * super().forward(o, gate)  # type: ignore[misc]


class DoublesReadout:
    """A mix-in of mixers."""

    def readout(self, o: Tensor, s: Streams) -> Tensor:
        return 2 * super().readout(o, s)  # type: ignore[misc]


class DoubledNorm(Doubles, GatedRMSNorm):
    """Doubled by a mix-in."""


class DoubledKDANorm(Doubles, SigmoidGatedRMSNorm):
    """The norm of KDA, doubled by a mix-in."""


class DoubledByMixIn(DoublesReadout, KDA):
    """Overrides nothing itself."""


class DoubledQueries(KDA):
    def gained(self, s: Streams) -> Streams:
        return s.replace(q=2 * s.q)


class OwnCarry(KDA):
    def carry(self, s: Streams, *args: Any) -> tuple[Streams, Any]:
        return super().carry(s, *args)


class ReadsBefore(GatedDeltaProduct):
    read_before = True


class WithoutErasing(KDA):
    recurrence = staticmethod(kernels.linear_recurrence)  # type: ignore[assignment]


class OwnBounds(LowerBounds):
    def odds(self, layer: int) -> Tensor | None:
        odds = super().odds(layer)
        return None if odds is None else odds + 1


class LearnedRotary(Rotary):
    """Turns by a learned base, so that its rates must not be kept."""

    def __init__(self, heads: int, size: int):
        super().__init__(heads, size)
        self.log_base = torch.nn.Parameter(torch.tensor(2.0))

    def frequencies(self, pair: Tensor) -> Tensor:
        return self.log_base.exp() ** (-2 * pair / self.turning)


class OtherStrength(Strength):
    def forward(self, b: Tensor) -> Tensor:
        return super().forward(b) / 2


class HalvedGates(CappedGates):
    def forward(self, i: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(i / 2, f / 2)


class DoubledLayerNorm(HeadLayerNorm):
    def forward(self, o: Tensor, gate: Tensor | None) -> Tensor:
        return 2 * super().forward(o, gate)


class HalvedTrapezoid(Trapezoid):
    def forward(self, a: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return super().forward(a / 2, r, w)


class OwnRotary(Rotary):
    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return 2 * super().forward(x, positions)


FUSED: dict[str, Factory] = {name: factory for name, factory in CAUSAL.items() if name in FUSED_TOKENS} | {
    "HGRN2 with SiLU": partial(HGRN2, q=Features(4, activation="silu"), head_dim=16),
    "GatedDeltaNet with shared keys": partial(GatedDeltaNet, num_key_heads=1),
    "GatedDeltaProduct without gate": partial(GatedDeltaProduct, output=NormOnly, num_steps=3),
    "RetNet with longer context": partial(RetNet, qk=Features(map=partial(YarnRotary, factor=4.0, original_length=8))),
    "Mamba2 with groups of heads": partial(Mamba2, state_dim=16, head_dim=16),
    "Mamba3 with a norm": partial(Mamba3, head_dim=16, state_dim=12, num_groups=2, output=GatedRMSNorm),
    "MLSTM without a normaliser": partial(MLSTM, input_gate="sigmoid", normaliser=False, gate_cap=None),
    "MLSTM with sigmoid and convolutions": partial(MLSTM, input_gate="sigmoid", qk=Features(4, activation="silu")),
}


@pytest.fixture
def products_in_pytorch(monkeypatch: pytest.MonkeyPatch):
    """Let PyTorch compute `kernels.linear`: the interpreter would take ten times as long for it as for all else."""
    implementations = sys.modules["kernels.linear"].OP.implementations
    monkeypatch.setitem(implementations, "triton", implementations["torch"])


@pytest.mark.usefixtures("products_in_pytorch")
@pytest.mark.parametrize("name", FUSED)
@torch.no_grad()
def test_a_token_is_fused(name: str):
    """One launch computes a token from the projections on, and what it computes is the layer."""
    mixer, x = FUSED[name](Site(hidden_size=32, num_heads=2, layer=1, num_layers=3)), torch.randn(2, 2, 32)
    for parameter in mixer.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
    state, outputs = mixer.init_state(2), []
    with kernels.backend("triton"), kernels.implementations() as ran:
        for t in range(2):
            y, state = mixer(x[:, t : t + 1], state)
            outputs.append(y)
    assert {"recurrence_token", "trapezoid_token"} & set(ran)
    assert not {"delta_rule", "linear_recurrence", "features"} & set(ran)
    with kernels.backend("torch"):
        expected, after = mixer(x, mixer.init_state(2))
    torch.testing.assert_close(torch.cat(outputs, 1), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state, after, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "mixer",
    [
        partial(HGRN2, head_dim=16, lower_bounds=OwnBounds),
        partial(RetNet, qk=Features(map=OwnRotary)),
        partial(RetNet, qk=Features(map=LearnedRotary)),
        DeltaNet,
        GatedDeltaProduct,
        MLSTM,
        partial(MLSTM, norm_eps=1e-3),
        partial(Mamba3, head_dim=16, decay=HalvedTrapezoid),
        partial(Mamba3, head_dim=16, state_dim=12),
    ],
)
@torch.no_grad()
def test_parts_of_a_subclass_are_called_for_a_token(mixer: Factory):
    layer, x = mixer(Site(hidden_size=32, num_heads=2, layer=1, num_layers=3)), torch.randn(2, 3, 32)
    if isinstance(layer, DeltaNet | GatedDeltaProduct):
        layer.beta = OtherStrength(layer.steps * layer.gate_heads)
    if isinstance(layer, MLSTM) and layer.o_norm.eps == 1e-3:
        layer.o_norm = DoubledLayerNorm(2, 16, 1e-3)
    elif isinstance(layer, Mamba3) and layer.key_size == 12:
        layer.k_norm = ZeroCentredRMSNorm(12)
    elif isinstance(layer, MLSTM):
        layer.gate = HalvedGates(2, None, 1.0)
    check_tokens(layer, x)


def check_tokens(layer: LinearMixer, x: Tensor) -> None:
    """Check that tokens one by one have the outputs of a sequence."""
    state, outputs = layer.init_state(len(x)), []
    for t in range(x.shape[1]):
        y, state = layer(x[:, t : t + 1], state)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, 1), layer(x)[0])


class Wrapped(nn.Module):
    """A part of a class that no kernel knows."""

    def __init__(self, part: nn.Module):
        super().__init__()
        self.part = part

    def forward(self, *args: Any) -> Any:
        return self.part(*args)


@pytest.mark.parametrize("part", ["MLSTM.gate", "MLSTM.o_norm", "Mamba3.decay", "Mamba3.q_norm"])
@torch.no_grad()
def test_parts_of_other_classes_are_called_for_a_token(part: str):
    kind, name = part.split(".")
    layer = CAUSAL[kind](Site(hidden_size=32, num_heads=2, layer=1, num_layers=3))
    setattr(layer, name, Wrapped(getattr(layer, name)))
    check_tokens(layer, torch.randn(2, 3, 32))


@pytest.mark.parametrize(
    "cls",
    [
        OwnReadout,
        OwnGates,
        OwnKDAGates,
        DoubledReadout,
        DoubledByMixIn,
        DoubledQueries,
        OwnCarry,
        WithoutErasing,
        ReadsBefore,
    ],
)
@torch.no_grad()
def test_a_token_is_not_fused_where_a_class_overrides_a_part(cls: type[LinearMixer]):
    mixer, x = cls(Site(hidden_size=32, num_heads=2)), torch.randn(2, 4, 32)  # type: ignore[call-arg]
    assert not mixer.fused_token
    check_tokens(mixer, x)


@pytest.mark.parametrize(
    ("base", "cls", "output"),
    [
        (GatedDeltaNet, DoubledReadout, GatedRMSNorm),
        (GatedDeltaNet, GatedDeltaNet, DoubledNorm),
        (KDA, KDA, DoubledKDANorm),
    ],
)
@torch.no_grad()
def test_own_readouts_and_norms_are_called_for_a_token(base: Any, cls: Any, output: type[Output]):
    site, x = Site(hidden_size=32, num_heads=2), torch.randn(2, 1, 32)
    plain, own = base(site), cls(site, output=output)
    own.load_state_dict(plain.state_dict())
    torch.testing.assert_close(own(x, own.init_state(2))[0], 2 * plain(x, plain.init_state(2))[0])


def test_rates_that_are_learned_get_gradients():
    layer = RetNet(Site(hidden_size=32, num_heads=2), qk=Features(map=LearnedRotary))
    layer(torch.randn(1, 5, 32))[0].sum().backward()
    rotary = layer.q_features.map
    assert isinstance(rotary, LearnedRotary)
    assert rotary.log_base.grad is not None
    assert float(rotary.log_base.grad.abs()) > 0
    copy.deepcopy(layer)
