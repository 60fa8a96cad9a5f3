"""Our mixers as settings and tensors of the modelling file, `modeling_token_mixer_zoo.py`.

A `Part` is some of the settings of one of its classes, and a rule for each of its tensors. Derived parameters are
computed here: decay rates instead of their logarithms, norm weights for all heads, gates of key heads for value heads.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mixers
from kernels import UserError
from mixers.decay import Strength
from mixers.expansion import Residual
from mixers.features import FeaturePath


@dataclass(frozen=True)
class Rule:
    """A tensor of the modelling file, computed from tensors of ours."""

    sources: tuple[str, ...]
    compute: Callable[..., Tensor] = field(default=lambda tensor: tensor)


@dataclass(frozen=True)
class Part:
    """Settings by their names, and rules by the names of the tensors."""

    settings: dict[str, Any] = field(default_factory=dict)
    rules: dict[str, Rule] = field(default_factory=dict)

    def __or__(self, other: "Part") -> "Part":
        return Part(self.settings | other.settings, self.rules | other.rules)

    def under(self, theirs: str, ours: str) -> dict[str, Rule]:
        """The rules with prefixes on the names."""
        return {
            theirs + name: Rule(tuple(ours + source for source in rule.sources), rule.compute)
            for name, rule in self.rules.items()
        }


def refusal(component: object, kind: str) -> UserError:
    """The error to raise for a component that the modelling file cannot compute."""
    return UserError(f"to: transformers cannot hold the {kind} {type(component).__name__}.")


def copied(**names: str) -> dict[str, Rule]:
    """Rules for linear maps that are taken over: their name → ours."""
    return {f"{theirs}.weight": Rule((f"{ours}.weight",)) for theirs, ours in names.items()}


def zeros_for(weight: Tensor) -> Tensor:
    """The bias of a linear map or convolution that has none."""
    return weight.new_zeros(weight.shape[0])


def norm_part(norm: nn.Module, name: str, ours: str, size: int, repeats: int = 1, groups: int = 1) -> Part:
    """A norm under a name; `repeats` says for how many heads its weight of `size` serves."""
    if type(norm) not in (mixers.RMSNorm, mixers.SimpleRMSNorm, mixers.ZeroCentredRMSNorm, mixers.LayerNorm):
        raise refusal(norm, "norm")
    assert isinstance(norm, mixers.Norm)
    centre = 1 if type(norm) is mixers.ZeroCentredRMSNorm else 0
    rules = {f"{name}.weight": Rule((f"{ours}.weight",), lambda weight: (weight + centre).repeat(repeats))}
    if type(norm) is mixers.SimpleRMSNorm:
        rules[f"{name}.weight"] = Rule((), lambda: torch.ones(size * repeats))
    if type(norm) is mixers.LayerNorm:
        rules[f"{name}.bias"] = Rule((f"{ours}.bias",), lambda bias: bias.repeat(repeats))
    kind = "layer" if type(norm) is mixers.LayerNorm else "rms"
    return Part({name: {"kind": kind, "eps": float(norm.eps), "groups": groups}}, rules)


def _features(paths: Mapping[str, FeaturePath]) -> Part:
    """The features of streams by their names."""
    settings, rules = {}, {}
    for stream, path in paths.items():
        spec, positions = path.spec, path.map
        theirs, ours = f"features.{stream}", f"{stream}_features"
        if spec.conv:
            rules[f"{theirs}.conv_weight"] = Rule((f"{ours}.weight",))
            bias = Rule((f"{ours}.bias",)) if spec.bias else Rule((f"{ours}.weight",), zeros_for)
            rules[f"{theirs}.conv_bias"] = bias
        kind, turning = "none", 0
        if type(positions) is mixers.Rotary:
            kind, turning = "rotary", positions.turning
            rules[f"{theirs}.frequency"] = Rule((), partial(_rotary, float(positions.base), turning))
        elif type(positions) is mixers.LRPE:
            kind = "lrpe"
            rules[f"{theirs}.frequency"] = Rule((f"{ours}.map.theta",), _wide)
        elif positions is not None:
            raise refusal(positions, "feature map")
        settings[stream] = {
            "conv": spec.conv,
            "activation": spec.activation,
            "norm": spec.norm,
            "map": kind,
            "turning": turning,
        }
    return Part({"features": settings}, rules)


def _rotary(base: float, turning: int) -> Tensor:
    """The angles by which the pairs turn per token [1,turning/2]."""
    pair = torch.arange(turning // 2, dtype=torch.float32)
    return (base ** (-2 * pair / turning))[None]


def _expansion(mixer: mixers.LinearMixer) -> Part:
    """The expansions of queries and keys, which are of one kind."""
    expansion = mixer.q_expand
    if expansion is None:
        return Part({"expansion": None})
    inner: Any = expansion.others if isinstance(expansion, Residual) else expansion
    if type(inner) not in _EXPANSIONS:
        raise refusal(inner, "expansion")
    settings = {
        "kind": _EXPANSIONS[type(inner)],
        "factor": inner.factor,
        "activation": getattr(inner, "activation", "identity"),
        "rank": inner.down.shape[1] if isinstance(inner, mixers.LowRank) else 0,
        "residual": inner is not expansion,
    }
    prefix = "" if inner is expansion else "others."
    names = [name for name, _ in inner.named_parameters()]
    rules = {f"expand.{x}.{name}": Rule((f"{x}_expand.{prefix}{name}",)) for x in "qk" for name in names}
    if mixer.q_gain is not None:
        rules["q_gain"] = Rule(("q_gain.weight",), lambda gain: F.pad(_wide(gain), (1, 0), value=1.0).flatten())
    return Part({"expansion": settings}, rules)


def _linear(mixer: mixers.LinearMixer, q: str = "q", k: str = "k", v: str = "v", out: str = "o_proj") -> Part:
    """What all mixers with a matrix state have; q, k, v and out are the names of projections."""
    if mixer.preconditioner is not None:
        raise refusal(mixer.preconditioner, "preconditioner")
    settings = {
        "num_heads": mixer.num_heads,
        "num_key_heads": mixer.num_key_heads,
        "key_size": mixer.key_size,
        "value_size": mixer.value_size,
        "subheads": mixer.subheads,
        "subhead_size": mixer.subhead_size,
        "scale": float(mixer.k_features.out_size**-0.5 if mixer.scale is None else mixer.scale),
        "decay": None,
        "delta": None,
        "erase_per_channel": False,
        "step_size": False,
        "skip": False,
        "norm": None,
        "gate": None,
        "gate_rank": 0,
        "gate_before_norm": False,
    }
    streams = {"in_proj.q": f"in_proj.{q}", "in_proj.k": f"in_proj.{k}", "in_proj.v": f"in_proj.{v}"}
    paths = {"q": mixer.q_features, "k": mixer.k_features, "v": mixer.v_features}
    return Part(settings, copied(**streams, o_proj=out)) | _expansion(mixer) | _features(paths)


def _decay(kind: str, rules: dict[str, Rule], rank: int = 0, per_channel: bool = False) -> Part:
    settings = {"kind": kind, "rank": rank, "per_channel": per_channel}
    return Part({"decay": settings}, {f"decay.{name}": rule for name, rule in rules.items()})


def _discretised(decay: nn.Module, projection: str) -> Part:
    """−exp(A_log) · softplus(a + dt_bias) of a projection a."""
    if type(decay) not in (mixers.Discretisation, mixers.Mamba2Discretisation):
        raise refusal(decay, "decay")
    rate = Rule(("decay.A_log",), lambda A_log: _wide(A_log).exp())
    bias = Rule(("decay.dt_bias",), _wide)
    return _decay("softplus", {**copied(proj=f"in_proj.{projection}"), "bias": bias, "rate": rate})


def _channel_decay(mixer: mixers.KDA | mixers.GatedDeltaNet2, repeated: Callable[[Tensor], Tensor]) -> Part:
    """Decays of each key channel from a few numbers f; `repeated` repeats heads for the value heads they serve."""
    decay, size = mixer.decay, mixer.subhead_size
    if type(decay) not in (mixers.ChannelDecay, mixers.BoundedChannelDecay):
        raise refusal(decay, "decay")
    bound = decay.lower_bound

    def channels(x: Tensor, A_log: Tensor) -> Tensor:
        """Rows or biases of channels, times the rates where these are inside the function."""
        heads = x.unflatten(0, (-1, size))
        if bound is not None:
            rates = _wide(A_log).exp().view(-1, *[1] * (heads.dim() - 1))
            heads = (_wide(heads) * rates).to(x.dtype)
        return repeated(heads).flatten(0, 1)

    def rate(A_log: Tensor) -> Tensor:
        outside = _wide(A_log).exp() if bound is None else torch.full_like(_wide(A_log), -bound)
        return repeated(outside)

    rules = {
        "proj.0.weight": Rule(("in_proj.f.weight",)),
        "proj.1.weight": Rule(("decay_up.weight", "decay.A_log"), channels),
        "bias": Rule(("decay.dt_bias", "decay.A_log"), lambda bias, A_log: channels(_wide(bias), A_log)),
        "rate": Rule(("decay.A_log",), rate),
    }
    return _decay("softplus" if bound is None else "sigmoid", rules, mixer.decay_up.in_features, per_channel=True)


def _constant(decay: nn.Module) -> Part:
    """Decays that are fixed; a subclass may choose them, but not how they are used."""
    if not isinstance(decay, mixers.ConstantDecay) or type(decay).forward is not mixers.ConstantDecay.forward:
        raise refusal(decay, "decay")
    values = tuple(decay.log_decay)
    return _decay("constant", {"constant": Rule((), lambda: torch.tensor(values, dtype=torch.float32))})


def _delta(beta: Strength, projection: str = "in_proj.b") -> Part:
    bias = Rule((f"{projection}.weight",), zeros_for)
    if beta.bias is not None:
        bias = Rule((f"{projection}.weight", "beta.bias"), lambda weight, bias: bias.to(weight.dtype))
    return Part(
        {"delta": float(beta.most)}, {"beta_proj.weight": Rule((f"{projection}.weight",)), "beta_proj.bias": bias}
    )


def _gate(activation: str, *names: str, biased: bool = False, before_norm: bool = False) -> Part:
    """A gate by the names of its projection, or of the two whose product that is."""
    last = f"{names[-1]}.bias" if biased else f"{names[-1]}.weight"
    theirs = ["g_proj"] if len(names) == 1 else ["g_proj.0", "g_proj.1"]
    rules = copied(**dict(zip(theirs, names, strict=True)))
    rules[f"{theirs[-1]}.bias"] = Rule((last,)) if biased else Rule((last,), zeros_for)
    return Part({"gate": activation, "gate_before_norm": before_norm}, rules)


def _output(mixer: Any, *gate: str, biased: bool = False) -> Part:
    """Norm and gate of each head, which are `o_norm`; `gate` are the names of the gate's projections."""
    output, heads, size = mixer.o_norm, mixer.num_heads, mixer.value_size
    if type(output) is mixers.GateOnly:
        return _gate("silu", *gate, biased=biased)
    if type(output) is mixers.GatedRMSNorm and output.groups == 1:
        weight = Rule(("o_norm.weight",), lambda weight: weight.repeat(heads))
        norm = Part({"norm": {"kind": "rms", "eps": float(output.eps), "groups": heads}}, {"norm.weight": weight})
        return norm | _gate("silu", *gate, biased=biased, before_norm=output.gate_first)
    if type(output) not in (mixers.NormOnly, mixers.SigmoidGatedRMSNorm):
        raise refusal(output, "output")
    norm = norm_part(output.norm, "norm", "o_norm.norm", size, heads, heads)
    return norm if type(output) is mixers.NormOnly else norm | _gate("sigmoid", *gate, biased=biased)


def _low_rank_output(mixer: mixers.KDA | mixers.GatedDeltaNet2) -> Part:
    """The same with a gate of low rank; it has none if the output is not gated."""
    if mixer.g_up is None:
        return _output(mixer)
    return _output(mixer, "in_proj.g", "g_up", biased=True) | Part({"gate_rank": mixer.g_up.in_features})


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _gated_deltanet(mixer: mixers.GatedDeltaNet) -> Part:
    part = _linear(mixer) | _delta(mixer.beta) | _output(mixer, "in_proj.g")
    return part if mixer.decay is None else part | _discretised(mixer.decay, "a")


def _deltanet(mixer: mixers.DeltaNet) -> Part:
    return _linear(mixer) | _delta(mixer.beta) | _norm_of_heads(mixer)


def _norm_of_heads(mixer: mixers.DeltaNet | mixers.LinearAttention) -> Part:
    return norm_part(mixer.o_norm, "norm", "o_norm", mixer.value_size, mixer.num_heads, mixer.num_heads)


def _kda(mixer: mixers.KDA) -> Part:
    return _linear(mixer) | _channel_decay(mixer, lambda x: x) | _delta(mixer.beta) | _low_rank_output(mixer)


def _gated_deltanet2(mixer: mixers.GatedDeltaNet2) -> Part:
    subheads, repeats, size = mixer.subheads, mixer.num_heads // mixer.num_key_heads, mixer.subhead_size

    def repeated(x: Tensor) -> Tensor:
        """Rows of the subheads of key heads, for all value heads."""
        return x.unflatten(0, (-1, subheads)).repeat_interleave(repeats, 0).flatten(0, 1)

    def channels(weight: Tensor) -> Tensor:
        return repeated(weight.unflatten(0, (-1, size))).flatten(0, 1)

    strengths = {
        "beta_proj.weight": Rule(("in_proj.b.weight",), channels),
        "beta_proj.bias": Rule(("in_proj.b.weight",), lambda weight: zeros_for(channels(weight))),
        **copied(write_proj="in_proj.w"),
    }
    erase = Part({"delta": float(mixer.erase.most), "erase_per_channel": True}, strengths)
    return _linear(mixer) | _channel_decay(mixer, repeated) | erase | _low_rank_output(mixer)


def _gla(mixer: mixers.GLA) -> Part:
    """Its decay log σ(a) / normalizer is −softplus(−a) / normalizer."""
    heads, rate = mixer.gate_heads, 1 / mixer.gate_normalizer
    rules = {
        "proj.0.weight": Rule(("in_proj.decay.weight",)),
        "proj.1.weight": Rule(("decay_up.weight",), torch.neg),
        "bias": Rule(("decay_up.bias",), lambda bias: -_wide(bias)),
        "rate": Rule((), lambda: torch.full((heads,), rate)),
    }
    decay = _decay("softplus", rules, mixer.decay_up.in_features, per_channel=True)
    return _linear(mixer) | decay | _output(mixer, "in_proj.g")


def _hgrn2(mixer: mixers.HGRN2) -> Part:
    layer, bounds = mixer.site.layer, mixer.lower_bounds
    part = _linear(mixer, k="f", v="i") | norm_part(mixer.g_norm, "norm", "g_norm", mixer.site.hidden_size)
    if bounds is None:
        return part | _decay("tied", {}, per_channel=True)
    if type(bounds) is not mixers.LowerBounds:
        raise refusal(bounds, "lower bounds")

    def odds(rows: Tensor) -> Tensor:
        rows = _wide(rows)
        return rows[1 : layer + 1].logsumexp(0) - torch.cat([rows[:1], rows[layer + 1 :]]).logsumexp(0)

    return part | _decay("bounded", {"odds": Rule(("lower_bounds.weight",), odds)}, per_channel=True)


def _mamba2(mixer: mixers.Mamba2) -> Part:
    norm = {"kind": "rms", "eps": float(mixer.norm.eps), "groups": mixer.norm.groups}
    rules = {"skip": Rule(("D",), _wide), "norm.weight": Rule(("norm.weight",))}
    part = _linear(mixer, q="C", k="B", v="x", out="out_proj") | _discretised(mixer.decay, "dt")
    part |= Part({"step_size": True, "skip": True, "norm": norm}, rules)
    return part | _gate("silu", "in_proj.z", before_norm=True)


def _retnet(mixer: mixers.RetNet) -> Part:
    return _linear(mixer) | _constant(mixer.decay) | _output(mixer, "in_proj.g")


def _linear_attention(mixer: mixers.LinearAttention) -> Part:
    return _linear(mixer) | _norm_of_heads(mixer)


def _low_rank_gated(mixer: mixers.TNL | mixers.CosFormer2) -> Part:
    width, norm = mixer.site.hidden_size, {"kind": "rms", "eps": float(mixer.norm_eps), "groups": 1}
    settings = {"norm": norm, "gate_rank": mixer.g_up.in_features}
    part = _linear(mixer) | _gate("sigmoid", "in_proj.g", "g_up")
    return part | Part(settings, {"norm.weight": Rule((), lambda: torch.ones(width))})


def _tnl(mixer: mixers.TNL) -> Part:
    return _low_rank_gated(mixer) | _constant(mixer.decay)


def _attention(mixer: mixers.SoftmaxAttention) -> Part:
    widths, rules = mixer.in_proj.widths, dict[str, Rule]()
    biased = {f"in_proj.{x}": mixer.in_proj.bias is not None for x in widths} | {
        "o_proj": mixer.o_proj.bias is not None
    }
    for ours, bias in biased.items():
        name = ours if ours == "o_proj" else f"{ours.removeprefix('in_proj.')}_proj"
        rules |= copied(**{name: ours})
        rules[f"{name}.bias"] = Rule((f"{ours}.bias",)) if bias else Rule((f"{ours}.weight",), zeros_for)
    settings = {
        "num_heads": mixer.num_heads,
        "num_key_heads": mixer.num_kv_heads,
        "head_dim": mixer.head_dim,
        "window": mixer.window_size,
        "q_norm": None,
        "k_norm": None,
        "gates": widths.get("g", 0),
    }
    part = Part(settings, rules) | _features({"q": mixer.q_features, "k": mixer.k_features})
    for name, norm, heads in (("q_norm", mixer.q_norm, mixer.num_heads), ("k_norm", mixer.k_norm, mixer.num_kv_heads)):
        if norm is not None:
            per_head = mixer.qk_norm_over == "head"
            size, repeats = (mixer.head_dim, heads) if per_head else (heads * mixer.head_dim, 1)
            part |= norm_part(norm, name, name, size, repeats, repeats)
    return part


_EXPANSIONS: dict[type, str] = {
    mixers.HeadWise: "head_wise",
    mixers.LowRank: "low_rank",
    mixers.DPFP: "dpfp",
    mixers.LFM: "lfm",
}
_LINEAR: dict[type, Callable[[Any], Part]] = {
    mixers.CosFormer2: _low_rank_gated,
    mixers.DeltaNet: _deltanet,
    mixers.GLA: _gla,
    mixers.GatedDeltaNet: _gated_deltanet,
    mixers.GatedDeltaNet2: _gated_deltanet2,
    mixers.HGRN2: _hgrn2,
    mixers.KDA: _kda,
    mixers.LinearAttention: _linear_attention,
    mixers.Mamba2: _mamba2,
    mixers.RetNet: _retnet,
    mixers.TNL: _tnl,
}
_ATTENTION = (mixers.SlidingWindowAttention, mixers.SoftmaxAttention)


def described(mixer: mixers.TokenMixer, post_norm: bool) -> Part:
    """The settings of a layer, and the tensors of its mixer.

    Raises:
        UserError: The modelling file cannot compute the mixer, or a component of it.
    """
    kind = type(mixer)
    if kind not in (*_LINEAR, *_ATTENTION):
        names = ", ".join(sorted(allowed.__name__ for allowed in (*_LINEAR, *_ATTENTION)))
        raise UserError(f"to: transformers cannot hold the mixer {kind.__name__}; it can hold {names}.")
    part = _LINEAR[kind](mixer) if kind in _LINEAR else _attention(mixer)  # type: ignore[arg-type]
    layer = {"mixer": kind.__name__, "kind": "linear" if kind in _LINEAR else "attention"}
    return Part({**layer, "settings": part.settings, "post_norm": post_norm}, part.rules)
