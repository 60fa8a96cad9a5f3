"""Arguments that do not fit each other end in one sentence: field, value, and what is allowed."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import mixers
from mixers import Expanded, ForgettingAttention, GatedDeltaNet, Site, SlidingWindowAttention

SITE, SMALL, WIDE, LARGE = Site(32, 4), Site(32, 2), Site(64, 2), Site(64, 4)


def case(build: Callable[..., Any], sentence: str, **arguments: Any) -> tuple[Any, ...]:
    """Return what is built with arguments, and the beginning of the sentence; with a $ all of it."""
    return build, sentence, arguments


def rotary(fraction: float) -> mixers.Features:
    return mixers.Features(map=partial(mixers.Rotary, fraction=fraction))


def expanded(mixer: Any = GatedDeltaNet, factor: int = 2, **options: Any) -> mixers.TokenMixer:
    return Expanded(mixer=mixer, factor=factor, **options)(WIDE)


ATTENTION, WINDOW = partial(mixers.SoftmaxAttention, SITE), partial(SlidingWindowAttention, SITE)
LATENT = partial(mixers.MultiheadLatentAttention, SITE)
GDN, GLA, MAMBA2 = (partial(each, LARGE) for each in (GatedDeltaNet, mixers.GLA, mixers.Mamba2))
GSA, MLSTM = partial(mixers.GatedSlotAttention, SMALL), partial(mixers.MLSTM, SMALL)
KDA, COMBA = (partial(each, SITE) for each in (mixers.KDA, mixers.Comba))
KEY_HEADS = KDA, COMBA, partial(mixers.GatedDeltaNet2, SITE), partial(mixers.GatedDeltaProduct, SITE)
RWKV7 = partial(mixers.RWKV7, SMALL, head_dim=8)
MAMBA3 = partial(mixers.Mamba3, SMALL, head_dim=16, state_dim=12, num_groups=2)
LLAMA3 = partial(mixers.Llama3Rotary, 1, 8, factor=2.0)
YARN = partial(mixers.YarnRotary, 1, factor=2.0, original_length=9)
BOUNDED, PRECONDITIONER = partial(mixers.BoundedChannelDecay, 2, 3), partial(mixers.Preconditioner, 2)
SIZED_BY_HEADS = mixers.GLA, mixers.TNL, mixers.SoftmaxAttention
DIVISOR = "num_heads: 5 does not divide hidden_size 64; choose a divisor$"
ALL_FULL_RANK = {"full_rank_gate": True, "full_rank_decay": True, "gate_bias": False}
WIDER = "num_heads: the model's 4 heads of head_dim 32 are wider than hidden_size 64"
CASES = [
    case(partial(mixers.RetNet, WIDE), r"expand_v: 0\.001 of head_dim 32 leaves no values$", expand_v=0.001),
    case(mixers.ConstantDecay, r"log_decay: \[.*\] must be numbers that are not above 0$", log_decay=[-1.0, 0.5]),
    case(mixers.ConstantDecay, r"log_decay: \[.*\] must be numbers that are not above 0$", log_decay=[math.nan]),
    case(partial(mixers.Discretisation, 4), r"low: 3\.0 must not be above high, 2\.0$", low=3.0, high=2.0),
    case(partial(mixers.GatedRMSNorm, 8), "groups: 3 do not divide size 8$", groups=3),
    *(case(each, DIVISOR, site=Site(64, 5)) for each in SIZED_BY_HEADS),
    *(case(each, "num_heads: 0 must be at least 1$", site=Site(64, 0)) for each in SIZED_BY_HEADS),
    case(ATTENTION, r"scale: 0\.0 must be a finite number above 0$", scale=0.0),
    case(ATTENTION, "gate: 'row' is not one of head, channel, or null$", gate="row"),
    case(ATTENTION, "qk_norm_over: 'row' is not one of head, width$", qk_norm_over="row"),
    *(
        case(ATTENTION, f"fraction: {fraction} of head_dim 8 is {count}; .* from 2 to 8$", qk=rotary(fraction))
        for fraction, count in ((0.4, 3), (1.5, 12), (0.0, 0))
    ),
    case(WINDOW, "num_heads: ", num_heads=5),
    case(WINDOW, "num_kv_heads: ", num_kv_heads=3),
    case(WINDOW, "window_size: ", window_size=1),
    case(partial(ForgettingAttention, SITE), "num_kv_heads: 3 does not divide num_heads 4$", num_kv_heads=3),
    case(LATENT, "rope_dim: 3 is odd; rotary embedding needs pairs$", rope_dim=3),
    case(LATENT, "rope_dim: 0 leaves no channels for positions; set rotary to null$", rope_dim=0),
    case(LATENT, "gate: 'row' is not one of head, channel, or null$", gate="row"),
    case(LATENT, "num_heads: 5 does not divide hidden_size 32; ", num_heads=5),
    case(GDN, "num_heads: 5 does not divide", num_heads=5),
    case(GDN, "num_key_heads", num_key_heads=3),
    case(GDN, WIDER, head_dim=32),
    case(GDN, "value_dim: 32 is given without head_dim", value_dim=32),
    *(case(each, "value_dim: 12 is given without head_dim", value_dim=12) for each in KEY_HEADS),
    *(case(each, r"num_key_heads: 3 does not divide the 4 \(value\) heads$", num_key_heads=3) for each in KEY_HEADS),
    case(KDA, "gate_bias: True needs a gate of low rank; set it to false with full_rank_gate$", full_rank_gate=True),
    case(KDA, "rank: 5 has no effect where decay and gate have full rank; leave it out$", rank=5, **ALL_FULL_RANK),
    case(COMBA, "correction: null needs unit_feedback=false, ", correction=None, unit_feedback=True),
    *(
        case(BOUNDED, f"lower_bound: {bound} must be a finite number below 0$", lower_bound=bound)
        for bound in (0.0, 1.0, math.nan, True, -math.inf)
    ),
    *(case(PRECONDITIONER, f"limit: {limit} must be above 1 and at most 2$", limit=limit) for limit in (0.5, 1, 2.5)),
    case(PRECONDITIONER, "limit: nan must be a finite number$", limit=math.nan),
    case(GSA, "num_slots: 0 must be at least 1", num_slots=0),
    case(GSA, "gate_normalizer: 0.0 must be a finite number above 0", gate_normalizer=0.0),
    case(GSA, "expand_v: a width of 3 cannot be divided into 2 heads", expand_v=0.1),
    case(GLA, "num_heads: ", num_heads=5),
    case(GLA, "expand_k: ", expand_k=0.3),
    case(GLA, "expand_v: ", expand_v=0.01),
    *(
        case(partial(mixers.LowerBounds, 4, 3), f"high: {high} must be between 0 and 1", high=high)
        for high in (0.0, 1.0, -0.5)
    ),
    case(partial(mixers.HGRN2, Site(256, 4)), "head_dim: ", head_dim=48),
    case(MAMBA2, "head_dim: ", head_dim=48),
    case(MAMBA2, "(num_key_heads|num_groups): ", head_dim=16, num_groups=3),
    case(MAMBA3, "head_dim: 48 does not divide the inner width 64 ", head_dim=48),
    case(MAMBA3, r"rotary_fraction: 1\.5 of 12 channels must be 2 to 12", rotary_fraction=1.5),
    case(MAMBA3, r"rotary_fraction: 0\.1 of 12 channels must be 2 to 12", rotary_fraction=0.1),
    case(MAMBA3, "num_key_heads: 3 does not divide", num_groups=3),
    case(MLSTM, "input_gate: 'tanh' must be exponential or sigmoid", input_gate="tanh"),
    case(MLSTM, "normaliser: false needs input_gate=sigmoid, ", normaliser=False),
    case(MLSTM, "expand_k: a width of 3 cannot be divided into 2 heads", expand_k=0.1),
    case(RWKV7, "head_dim: 5 does not divide hidden_size 32", head_dim=5),
    case(mixers.Features, "conv: ", bias=True),
    case(mixers.Features, "activation: ", activation="gelu"),
    case(mixers.Features, "norm: ", norm="l3"),
    case(partial(mixers.Rotary, 2), "head_dim: 7 is odd", size=7),
    case(mixers.SoftmaxAttention, "head_dim: 5 is odd", site=Site(20, 4)),
    case(partial(mixers.LinearRotary, 1, 8), "factor: 0.0 must be a finite number above 0", factor=0.0),
    case(LLAMA3, "fast_turns: 4.0 must be above", original_length=9, slow_turns=4.0),
    case(YARN, "base: 1.0 must be above 1", size=8, base=1.0),
    case(YARN, "head_dim: 7 is odd", size=7),
    case(partial(mixers.LowRank, 2, 8, 4, 12), "rank: 0 must be at least 1", rank=0),
    case(expanded, "factor: DPFP expands by even factors, not by 3", factor=3, expansion=mixers.DPFP),
    case(expanded, "factor: 0 must be at least 1", factor=0),
    case(expanded, "recompute: 'keys' must be true, queries, states or false", recompute="keys"),
    case(expanded, "residual: true needs subheads, one of which is the unchanged head", subheads=False, residual=True),
    *(
        case(expanded, "mixer: an Expanded inside an Expanded", mixer=Expanded(mixer=GatedDeltaNet, factor=factor))
        for factor in (1, 2)
    ),
    *(
        case(expanded, "mixer: SlidingWindowAttention has no matrix state", mixer=SlidingWindowAttention, factor=factor)
        for factor in (1, 2)
    ),
    case(expanded, "mixer: ForgettingAttention has no matrix state to expand; ", mixer=ForgettingAttention),
]


@pytest.mark.parametrize(("build", "sentence", "arguments"), CASES, ids=[sentence[:30] for _, sentence, _ in CASES])
def test_mistakes(build: Callable[..., Any], sentence: str, arguments: dict[str, Any]):
    with pytest.raises(mixers.UserError, match=f"^{sentence}"):
        build(**arguments)
