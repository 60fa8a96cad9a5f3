"""Parts of mixers and models as settings and tensors of the modelling file, `modeling_token_mixer_zoo.py`.

Derived parameters are computed here: decay rates instead of their logarithms, norm weights for all heads, and biases of
0 for maps that have none.
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

EXPANSIONS: Mapping[type, str] = {
    mixers.HeadWise: "head_wise",
    mixers.LowRank: "low_rank",
    mixers.DPFP: "dpfp",
    mixers.LFM: "lfm",
}


@dataclass(frozen=True)
class Rule:
    """Computation of a tensor of the modelling file from tensors of a model.

    Attributes:
        sources: The names of the model's tensors.
        compute: Function of these tensors; by default the identity of a single one.
    """

    sources: tuple[str, ...]
    compute: Callable[..., Tensor] = field(default=lambda tensor: tensor)


@dataclass(frozen=True)
class Part:
    """Settings by their names, and rules by the names of the tensors in the modelling file."""

    settings: dict[str, Any] = field(default_factory=dict)
    rules: dict[str, Rule] = field(default_factory=dict)

    def __or__(self, other: "Part") -> "Part":
        return Part(self.settings | other.settings, self.rules | other.rules)

    def under(self, theirs: str, ours: str) -> dict[str, Rule]:
        """Return the rules with prefixes for the names in the modelling file and in the model."""
        return {
            theirs + name: Rule(tuple(ours + source for source in rule.sources), rule.compute)
            for name, rule in self.rules.items()
        }


def refusal(component: object, kind: str) -> UserError:
    """Return the error to raise for a component that the modelling file cannot compute."""
    return UserError(f"to: transformers cannot hold the {kind} {type(component).__name__}.")


def check_ones(factors: Mapping[str, float]) -> None:
    """Refuse factors other than 1, which the modelling file does not have."""
    for name, factor in factors.items():
        if factor != 1:
            raise UserError(f"to: transformers cannot hold {name} {factor:g}; it can hold 1.")


def wide(x: Tensor) -> Tensor:
    """Return x in at least fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def copied(**names: str) -> dict[str, Rule]:
    """Return rules for weights of linear maps; arguments map names of the file to names of the model."""
    return {f"{theirs}.weight": Rule((f"{ours}.weight",)) for theirs, ours in names.items()}


def zeros_for(weight: Tensor) -> Tensor:
    """Return the bias of a linear map or convolution without one."""
    return weight.new_zeros(weight.shape[0])


def biased(theirs: str, ours: str, bias: bool) -> dict[str, Rule]:
    """Return rules for a linear map and its bias, which is 0 if the model's map has none."""
    return copied(**{theirs: ours}) | {
        f"{theirs}.bias": Rule((f"{ours}.bias",)) if bias else Rule((f"{ours}.weight",), zeros_for)
    }


def rms_part(eps: float, groups: int, weight: Rule) -> Part:
    """Describe the RMSNorm of each of `groups` parts of a layer's output."""
    return Part({"norm": {"kind": "rms", "eps": float(eps), "groups": groups}}, {"norm.weight": weight})


def norm_part(norm: nn.Module, name: str, ours: str, size: int, repeats: int = 1, groups: int = 1) -> Part:
    """Describe the norm called `name`; its weight of `size` entries is repeated for `repeats` heads."""
    if type(norm) not in (mixers.RMSNorm, mixers.SimpleRMSNorm, mixers.ZeroCentredRMSNorm, mixers.LayerNorm):
        raise refusal(norm, "norm")
    assert isinstance(norm, mixers.Norm)
    centre = 1 if type(norm) is mixers.ZeroCentredRMSNorm else 0
    rules = {f"{name}.weight": Rule((f"{ours}.weight",), lambda weight: (wide(weight) + centre).repeat(repeats))}
    if type(norm) is mixers.SimpleRMSNorm:
        rules[f"{name}.weight"] = Rule((), lambda: torch.ones(size * repeats))
    if type(norm) is mixers.LayerNorm:
        rules[f"{name}.bias"] = Rule((f"{ours}.bias",), lambda bias: wide(bias).repeat(repeats))
    kind = "layer" if type(norm) is mixers.LayerNorm else "rms"
    return Part({name: {"kind": kind, "eps": float(norm.eps), "groups": groups}}, rules)


def features_part(paths: Mapping[str, FeaturePath]) -> Part:
    """Describe the features of each stream, by its name."""
    settings, rules = {}, dict[str, Rule]()
    for stream, path in paths.items():
        spec, positions, kind, turning = path.spec, path.map, "none", 0
        theirs, ours = f"features.{stream}", f"{stream}_features"
        if spec.conv:
            rules[f"{theirs}.conv_weight"] = Rule((f"{ours}.weight",))
            bias = Rule((f"{ours}.bias",)) if spec.bias else Rule((f"{ours}.weight",), zeros_for)
            rules[f"{theirs}.conv_bias"] = bias
        if type(positions) in (mixers.Rotary, mixers.LinearRotary, mixers.Llama3Rotary):
            assert isinstance(positions, mixers.Rotary)
            kind, turning = "rotary", positions.turning
            rules[f"{theirs}.frequency"] = Rule((), partial(_frequencies, positions))
        elif type(positions) is mixers.LRPE:
            kind = "lrpe"
            rules[f"{theirs}.frequency"] = Rule((f"{ours}.map.theta",), wide)
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


def _frequencies(rotary: mixers.Rotary) -> Tensor:
    """Return the rotation angles per token of all pairs, [1,turning/2]."""
    return rotary.frequencies(torch.arange(rotary.turning // 2, dtype=torch.float32))[None]


def expansion_part(mixer: mixers.LinearMixer) -> Part:
    """Describe the expansions of queries and keys, which have the same settings."""
    expansion = mixer.q_expand
    if expansion is None:
        return Part({"expansion": None})
    inner: Any = expansion.others if isinstance(expansion, Residual) else expansion
    if type(inner) not in EXPANSIONS:
        raise refusal(inner, "expansion")
    settings = {
        "kind": EXPANSIONS[type(inner)],
        "factor": inner.factor,
        "activation": getattr(inner, "activation", "identity"),
        "rank": inner.down.shape[1] if isinstance(inner, mixers.LowRank) else 0,
        "residual": inner is not expansion,
    }
    prefix = "" if inner is expansion else "others."
    names = [name for name, _ in inner.named_parameters()]
    rules = {f"expand.{x}.{name}": Rule((f"{x}_expand.{prefix}{name}",)) for x in "qk" for name in names}
    if mixer.q_gain is not None:
        rules["q_gain"] = Rule(("q_gain.weight",), lambda gain: F.pad(wide(gain), (1, 0), value=1.0).flatten())
    return Part({"expansion": settings}, rules)


def linear_part(mixer: mixers.LinearMixer, q: str = "q", k: str = "k", v: str = "v", out: str = "o_proj") -> Part:
    """Describe the parts that all mixers with a matrix state share; q, k, v and out name the projections."""
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
    return Part(settings, copied(**streams, o_proj=out)) | expansion_part(mixer) | features_part(paths)


def decay_part(kind: str, rules: Mapping[str, Rule], rank: int = 0, per_channel: bool = False) -> Part:
    """Describe the decays of a layer."""
    settings = {"kind": kind, "rank": rank, "per_channel": per_channel}
    return Part({"decay": settings}, {f"decay.{name}": rule for name, rule in rules.items()})


def discretised_part(decay: nn.Module, projection: str) -> Part:
    """Describe the log decays −exp(A_log) · softplus(a + dt_bias) of a projection a."""
    if type(decay) not in (mixers.Discretisation, mixers.Mamba2Discretisation):
        raise refusal(decay, "decay")
    rate = Rule(("decay.A_log",), lambda A_log: wide(A_log).exp())
    bias = Rule(("decay.dt_bias",), wide)
    return decay_part("softplus", {**copied(proj=f"in_proj.{projection}"), "bias": bias, "rate": rate})


def channel_decay_part(decay: nn.Module, rank: int, repeated: Callable[[Tensor], Tensor] = lambda heads: heads) -> Part:
    """Describe log decays per key channel from `rank` numbers; `repeated` repeats key heads for value heads."""
    if type(decay) not in (mixers.ChannelDecay, mixers.BoundedChannelDecay):
        raise refusal(decay, "decay")
    assert isinstance(decay, mixers.ChannelDecay)
    bound, size = decay.lower_bound, decay.size

    def channels(x: Tensor, A_log: Tensor) -> Tensor:
        """Repeat rows of channels; multiply them by the rates first if decays are bounded."""
        heads = x.unflatten(0, (-1, size))
        if bound is not None:
            rates = wide(A_log).exp().view(-1, *[1] * (heads.dim() - 1))
            heads = (wide(heads) * rates).to(x.dtype)
        return repeated(heads).flatten(0, 1)

    def rate(A_log: Tensor) -> Tensor:
        return repeated(wide(A_log).exp() if bound is None else torch.full_like(wide(A_log), -bound))

    rules = {
        "proj.0.weight": Rule(("in_proj.f.weight",)),
        "proj.1.weight": Rule(("decay_up.weight", "decay.A_log"), channels),
        "bias": Rule(("decay.dt_bias", "decay.A_log"), lambda bias, A_log: channels(wide(bias), A_log)),
        "rate": Rule(("decay.A_log",), rate),
    }
    return decay_part("softplus" if bound is None else "sigmoid", rules, rank, per_channel=True)


def constant_part(decay: nn.Module) -> Part:
    """Describe constant decays; a subclass may choose their values, but not override `forward`."""
    if not isinstance(decay, mixers.ConstantDecay) or type(decay).forward is not mixers.ConstantDecay.forward:
        raise refusal(decay, "decay")
    values = tuple(decay.log_decay)
    return decay_part("constant", {"constant": Rule((), lambda: torch.tensor(values, dtype=torch.float32))})


def delta_part(beta: Strength) -> Part:
    """Describe the delta rule with the strengths β of the projection b."""
    rules = biased("beta_proj", "in_proj.b", bias=False)
    if beta.bias is not None:
        cast = Rule(("beta.bias", "in_proj.b.weight"), lambda bias, weight: bias.to(weight.dtype))
        rules["beta_proj.bias"] = cast
    return Part({"delta": float(beta.most)}, rules)


def gate_part(activation: str, *names: str, bias: bool = False, before_norm: bool = False) -> Part:
    """Describe an output gate by its projection, or by the two projections of a low-rank gate."""
    theirs = ["g_proj"] if len(names) == 1 else ["g_proj.0", "g_proj.1"]
    first = copied(**dict(zip(theirs[:-1], names[:-1], strict=True)))
    return Part({"gate": activation, "gate_before_norm": before_norm}, first | biased(theirs[-1], names[-1], bias))


def output_part(mixer: Any, *gate: str, bias: bool = False) -> Part:
    """Describe `o_norm`, the norm and gate of each head; `gate` names the projections of its gate, if any."""
    output, heads, size = mixer.o_norm, mixer.num_heads, mixer.value_size
    if type(output) is mixers.GateOnly:
        return gate_part("silu", *gate, bias=bias)
    if type(output) is mixers.GatedRMSNorm and output.groups == 1:
        norm = rms_part(output.eps, heads, Rule(("o_norm.weight",), lambda weight: wide(weight).repeat(heads)))
        return norm | gate_part("silu", *gate, bias=bias, before_norm=output.gate_first)
    if type(output) not in (mixers.NormOnly, mixers.SigmoidGatedRMSNorm):
        raise refusal(output, "output")
    norm = norm_part(output.norm, "norm", "o_norm.norm", size, heads, heads)
    return norm if type(output) is mixers.NormOnly else norm | gate_part("sigmoid", *gate, bias=bias)
