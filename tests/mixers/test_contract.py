"""The registry passes the contract, and each clause of the contract catches a mixer that breaks it."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kernels
import mixers
from mixers import Expanded, GatedDeltaNet, LinearMixer, Mamba2, Site, SlidingWindowAttention, SoftmaxAttention
from mixers.contract import CLAUSES, NOT_CAUSAL

from .variants import PRECONDITIONED, REGISTERED

LINEAR = [name for name in REGISTERED if issubclass(mixers.get(name), LinearMixer)]
VARIANTS = {
    **REGISTERED,
    **{f"{name}, subheads": Expanded(mixer=REGISTERED[name], factor=2) for name in LINEAR},
    **{f"{name}, one long head": Expanded(mixer=REGISTERED[name], factor=2, subheads=False) for name in LINEAR},
}
ARGUMENTS = {
    "more value heads than key heads": partial(GatedDeltaNet, num_heads=4, num_key_heads=2, head_dim=8, value_dim=24),
    "negative eigenvalues": partial(GatedDeltaNet, allow_neg_eigval=True),
    "no short convolution": partial(GatedDeltaNet, qk=mixers.Features(norm="l1"), v=mixers.Features()),
    "positions in a recurrence": partial(GatedDeltaNet, qk=mixers.Features(2, norm="l2", map=mixers.Rotary)),
    "GLA with short convolutions": partial(
        mixers.GLA, expand_k=1, qk=mixers.Features(4, activation="silu"), v=mixers.Features(4, activation="silu")
    ),
    "GLA without a gate": partial(mixers.GLA, output_gate=False),
    "RetNet without a gate": partial(mixers.RetNet, output_gate=False),
    "DeltaNet with negative eigenvalues": partial(mixers.DeltaNet, allow_neg_eigval=True),
    "KDA with shared keys": partial(mixers.KDA, num_heads=4, num_key_heads=2, head_dim=8, value_dim=24),
    "KDA with bounded decays": partial(mixers.KDA, decay=mixers.BoundedChannelDecay, allow_neg_eigval=True, rank=3),
    "KDA without an output gate": partial(mixers.KDA, output=mixers.NormOnly),
    "KDA with gates of full rank": partial(
        mixers.KDA, num_heads=4, num_key_heads=2, head_dim=8, full_rank_decay=True, full_rank_gate=True, gate_bias=False
    ),
    "GatedDeltaNet2 with shared keys": partial(
        mixers.GatedDeltaNet2, num_heads=4, num_key_heads=2, head_dim=8, value_dim=24, allow_neg_eigval=True
    ),
    "GatedDeltaNet2 without an output gate": partial(mixers.GatedDeltaNet2, output=mixers.NormOnly),
    "Comba with shared keys": partial(mixers.Comba, num_heads=4, num_key_heads=2, head_dim=8, value_dim=24),
    "Comba with feedback of length one": partial(mixers.Comba, unit_feedback=True, correction=0.02),
    "Comba without correction and gate": partial(mixers.Comba, correction=None, output=mixers.NormOnly),
    "three steps with shared keys": partial(
        mixers.GatedDeltaProduct, num_steps=3, num_heads=4, num_key_heads=2, head_dim=8, value_dim=24
    ),
    "one step": partial(mixers.GatedDeltaProduct, num_steps=1, allow_neg_eigval=False),
    "two steps without decay, norm and convolution": partial(
        mixers.GatedDeltaProduct, decay=None, output=mixers.GateOnly, qk=mixers.Features(norm="l2")
    ),
    **PRECONDITIONED,
    "preconditioned, with shared keys and other limits": partial(
        GatedDeltaNet,
        num_heads=4,
        num_key_heads=2,
        head_dim=8,
        value_dim=24,
        decay=None,
        preconditioner=partial(mixers.Preconditioner, limit=2.0, centre=-3.0),
    ),
    "no lower bounds": partial(mixers.HGRN2, lower_bounds=None),
    "no lower bounds, one state per channel": partial(mixers.HGRN1, lower_bounds=None),
    "narrow values": partial(mixers.RetNet, expand_v=1),
    "one head": partial(mixers.TNL, num_heads=1),
    "LRPE in linear attention": partial(mixers.LinearAttention, qk=mixers.Features(activation="relu", map=mixers.LRPE)),
    "one state per channel": partial(mixers.Mamba1, state_dim=1, conv=2, expand=1),
    "groups": partial(Mamba2, head_dim=16, state_dim=16, num_groups=4),
    "no bias": partial(Mamba2, head_dim=32, state_dim=16, expand=1, xbc=mixers.Features(4, activation="silu")),
    "grouped queries": partial(SoftmaxAttention, num_heads=4, num_kv_heads=2),
    "normalised queries": partial(SoftmaxAttention, qk=mixers.Features(norm="l2", map=mixers.Rotary)),
    "no positions": partial(SoftmaxAttention, qk=mixers.Features()),
    "window of grouped queries": partial(SlidingWindowAttention, window_size=2, num_heads=4, num_kv_heads=1),
    "window with a convolution": partial(SlidingWindowAttention, window_size=5, qk=mixers.Features(3, bias=True)),
    "normed and gated heads": partial(
        SoftmaxAttention,
        num_heads=4,
        num_kv_heads=2,
        qk=mixers.Features(map=partial(mixers.Rotary, base=1e6, fraction=0.25)),
        qk_norm=mixers.ZeroCentredRMSNorm,
        gate="channel",
    ),
    "a norm over all heads, and a gate of each": partial(
        SoftmaxAttention, num_kv_heads=1, qk_norm=mixers.RMSNorm, qk_norm_over="width", gate="head"
    ),
    "biases and a scale": partial(SoftmaxAttention, gate="channel", bias=True, output_bias=True, scale=0.7),
    "window of normed and gated heads": partial(
        SlidingWindowAttention, window_size=5, qk_norm=mixers.RMSNorm, gate="channel", bias=True
    ),
    "window longer than the sequence": partial(SlidingWindowAttention, window_size=300, head_dim=16),
    "mLSTM with sigmoid gates": partial(mixers.MLSTM, input_gate="sigmoid", input_bias=0.0, gate_cap=None),
    "mLSTM without a normaliser": partial(
        mixers.MLSTM, input_gate="sigmoid", normaliser=False, input_bias=-1.0, qk=mixers.Features(4), expand_k=1.0
    ),
    "mLSTM without caps": partial(mixers.MLSTM, gate_cap=None, input_bias=0.5, v=mixers.Features(4)),
    "latent queries, and keys longer than values": partial(
        mixers.MultiheadLatentAttention, num_heads=4, head_dim=12, rope_dim=6, value_dim=10, kv_rank=20, q_rank=14
    ),
    "latent attention without positions": partial(mixers.MultiheadLatentAttention, rotary=None),
    "latent attention with a gate per channel, as in Kimi K3": partial(
        mixers.MultiheadLatentAttention, rotary=None, q_rank=14, value_dim=10, gate="channel"
    ),
    "latent attention without shared channels, as in GLM-5.3-Flash": partial(
        mixers.MultiheadLatentAttention, rotary=None, q_rank=14, rope_dim=0
    ),
    "latent attention with a gate per head, as in Ling 3.0": partial(mixers.MultiheadLatentAttention, gate="head"),
    "Mamba3 with groups, all of whose channels are rotated": partial(
        mixers.Mamba3, head_dim=16, state_dim=16, num_groups=4, rotary_fraction=1.0, output=mixers.GatedRMSNorm
    ),
    "Mamba3 without a gate": partial(mixers.Mamba3, head_dim=32, state_dim=7, expand=1, output=mixers.NormOnly),
    "Forgetting Attention Pro": partial(
        mixers.ForgettingAttention, qk_norm=mixers.RMSNorm, shift=True, output=mixers.SigmoidGatedRMSNorm
    ),
    "Forgetting Attention with shared keys": partial(
        mixers.ForgettingAttention, num_heads=4, num_kv_heads=2, shift=True, output=mixers.NormOnly
    ),
    "slots of another number and size": partial(
        mixers.GatedSlotAttention, num_slots=5, expand_k=0.5, expand_v=2.0, qk=mixers.Features(4, norm="l2")
    ),
    "a width of Mamba2 by its heads": partial(Mamba2, num_heads=6, head_dim=10, state_dim=8, num_groups=2),
}
FEATURES = {
    f"{activation}, norm {norm}": mixers.Features(activation=activation, norm=norm)
    for activation in mixers.features.ACTIVATIONS
    for norm in mixers.features.NORMS
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_registered_mixers(name: str):
    mixer = mixers.get(name.partition(",")[0])
    places = 2 if mixer.passes else 1  # alone, and above another
    clauses = len(CLAUSES if mixer.causal else NOT_CAUSAL)
    assert len(mixers.check_mixer(VARIANTS[name], expanded=False)) == places * clauses


@pytest.mark.slow
@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name: str):
    # expanded too, where there is a matrix to expand
    assert len(mixers.check_mixer(ARGUMENTS[name])) in (len(CLAUSES), 3 * len(CLAUSES))


@pytest.mark.slow
@pytest.mark.parametrize("name", FEATURES)
def test_features(name: str):
    factory = partial(GatedDeltaNet, num_heads=2, head_dim=16, qk=FEATURES[name], allow_neg_eigval=True)
    assert len(mixers.check_mixer(factory, expanded=False)) == len(CLAUSES)


def test_the_position_encoding():
    # not registered, as it stands below the first layer
    assert len(mixers.check_mixer(mixers.TPE)) == len(CLAUSES)


def test_the_two_names_of_everything_that_passed():
    passed = mixers.check_mixer(GatedDeltaNet)
    assert "causality" in passed
    assert "expanded with subheads: causality" in passed
    assert "expanded without subheads: causality" in passed


class Peeks(GatedDeltaNet):
    def project(self, x: Tensor):
        return super().project(x + F.pad(x[:, 1:], (0, 0, 0, 1)))


class ForgetsDocuments(GatedDeltaNet):
    def forward(self, x, state=None, *, cu_seqlens=None):
        return super().forward(x, state)


class CannotContinueDocuments(GatedDeltaNet):
    def forward(self, x, state=None, *, cu_seqlens=None):
        y, after = super().forward(x, state, cu_seqlens=cu_seqlens)
        packed = state is not None and cu_seqlens is not None
        return y, self.init_state(len(cu_seqlens) - 1) if packed else after


class ForgetsItsState(GatedDeltaNet):
    def forward(self, x, state=None, *, cu_seqlens=None):
        y, _ = super().forward(x, cu_seqlens=cu_seqlens)
        return y, state


class KeepsWhatNobodyAskedFor(GatedDeltaNet):
    def forward(self, x, state=None, *, cu_seqlens=None):
        rows = len(x) if cu_seqlens is None else len(cu_seqlens) - 1
        return super().forward(x, self.init_state(rows) if state is None else state, cu_seqlens=cu_seqlens)


class ExaggeratesItsState(GatedDeltaNet):
    def state_size(self, length=None):
        return 2 * super().state_size(length)


class Grows(SoftmaxAttention):
    constant_state = True

    def state_size(self, length=None):
        return 0


class ClaimsToGrow(GatedDeltaNet):
    constant_state = False


class HasAnIdleParameter(GatedDeltaNet):
    def __init__(self, site: Site):
        super().__init__(site)
        self.idle = nn.Linear(2, 2)


class HasANanGradient(GatedDeltaNet):
    def readout(self, o: Tensor, s):
        # √0 has no finite derivative, though its value is fine
        return super().readout(o, s) + (self.o_norm.weight.sum() * 0).sqrt()


class LeavesTheMetaDevice(GatedDeltaNet):
    def __init__(self, site: Site):
        super().__init__(site)
        self.register_buffer("ramp", torch.arange(3.0, device="cpu"))


class CannotBeFilled(GatedDeltaNet):
    def __init__(self, site: Site):
        super().__init__(site)
        self.shift = nn.Parameter(torch.zeros(site.hidden_size))  # and no reset_parameters

    def forward(self, x, state=None, *, cu_seqlens=None):
        return super().forward(x + self.shift, state, cu_seqlens=cu_seqlens)


class SavesTooLittle(GatedDeltaNet):
    def __init__(self, site: Site):
        super().__init__(site)
        self.register_buffer("shift", torch.randn(site.hidden_size), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.shift)

    def forward(self, x, state=None, *, cu_seqlens=None):
        return super().forward(x + self.shift, state, cu_seqlens=cu_seqlens)


class AnswersInFp32(GatedDeltaNet):
    def forward(self, x, state=None, *, cu_seqlens=None):
        y, state = super().forward(x, state, cu_seqlens=cu_seqlens)
        return kernels.at_least_fp32(y), state


class LosesBits(GatedDeltaNet):
    def forward(self, x, state=None, *, cu_seqlens=None):
        # a large offset that cancels is harmless in fp32 and fatal in bf16
        return super().forward((x + 300) - 300, state, cu_seqlens=cu_seqlens)


class CountsTooManyFlops(GatedDeltaNet):
    def flops(self, length: int) -> int:
        return int(1.1 * super().flops(length))


class ForgetsItsAttentionFlops(SoftmaxAttention):
    def flops(self, length: int) -> int:
        return 2 * length * sum(p.numel() for p in self.parameters())


class ClaimsToSeeTheFuture(GatedDeltaNet):
    causal = False


BROKEN = {
    ClaimsToSeeTheFuture: {"mixes both ways", "takes no state"},
    Peeks: {"causality", "whole is pieces is tokens", "packed documents are separate"},
    ForgetsDocuments: {"packed documents are separate"},
    CannotContinueDocuments: {"packed documents are separate"},
    ForgetsItsState: {"whole is pieces is tokens"},
    KeepsWhatNobodyAskedFor: {"shapes and dtypes"},
    ExaggeratesItsState: {"state size is true"},
    Grows: {"state size is true"},
    ClaimsToGrow: {"state size is true"},
    HasAnIdleParameter: {"every parameter has a gradient"},
    HasANanGradient: {"every parameter has a gradient"},
    LeavesTheMetaDevice: {"meta device"},
    CannotBeFilled: {"meta device"},
    SavesTooLittle: {"state dict round trip"},
    AnswersInFp32: {"bf16 is close to fp32"},
    LosesBits: {"bf16 is close to fp32"},
    CountsTooManyFlops: {"flops are what is counted"},
    ForgetsItsAttentionFlops: {"flops are what is counted"},
}


def broken_clauses(factory, **options) -> set[str]:
    with pytest.raises(mixers.ContractError) as caught:
        mixers.check_mixer(factory, **options)
    lines = [line for line in str(caught.value).splitlines() if ": " in line]
    names = {clause.__name__.replace("_", " ") for clause in (*CLAUSES, *NOT_CAUSAL)}
    return {line.rpartition("subheads: ")[0] + name for line in lines for name in names if f"{name}: " in line}


@pytest.mark.slow
@pytest.mark.parametrize("mixer", BROKEN, ids=lambda mixer: mixer.__name__)
def test_a_broken_mixer_is_caught_by_its_clause(mixer):
    # exactly that clause: a report of more would send its author looking in the wrong place
    assert broken_clauses(mixer, expanded=False) == BROKEN[mixer]


def test_a_state_that_grows_is_told_how_to_say_so():
    with pytest.raises(mixers.ContractError, match=r"state grew from 0 to \d+ in .* says constant_state = False"):
        mixers.check_mixer(Grows, expanded=False)


class CountsHeadsInsteadOfGates(GatedDeltaNet):
    """Sizes its gates by the number of heads: right until someone expands it."""

    def __init__(self, site: Site):
        super().__init__(site)
        width, heads = self.o_proj.in_features, self.num_heads
        widths = {"q": width, "k": width, "v": width, "g": width, "a": heads, "b": heads}
        self.in_proj = mixers.Projection(site.hidden_size, widths)
        self.decay = mixers.Discretisation(heads, 0, 16)


@pytest.mark.slow
def test_gates_sized_by_heads_break_with_subheads_alone():
    mixers.check_mixer(CountsHeadsInsteadOfGates, expanded=False)
    actual = broken_clauses(CountsHeadsInsteadOfGates)
    assert "expanded with causality" in actual
    assert all(name.startswith("expanded with ") for name in actual)


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 63, 64, 100])
@pytest.mark.parametrize("name", [name for name in REGISTERED if mixers.get(name).causal])
def test_no_bit_of_an_output_depends_on_later_tokens(name: str, at: int):
    torch.manual_seed(0)
    mixer = REGISTERED[name](Site(64, 2, layer=1, num_layers=2))
    x = torch.randn(2, 130, 64)
    other = torch.cat([x[:, :at], 10 * torch.randn(2, 130 - at, 64)], 1)
    assert torch.equal(mixer(x)[0][:, :at], mixer(other)[0][:, :at])
