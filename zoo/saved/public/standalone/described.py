"""Mixers as settings and tensors of the modelling file. A new mixer needs a function and a table entry here."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import mixers
from kernels import UserError
from zoo.saved.public.standalone.parts import (
    Part,
    Rule,
    biased,
    channel_decay_part,
    check_ones,
    constant_part,
    copied,
    decay_part,
    delta_part,
    discretised_part,
    features_part,
    gate_part,
    linear_part,
    norm_part,
    output_part,
    refusal,
    rms_part,
    wide,
    zeros_for,
)


def _gated_deltanet(mixer: mixers.GatedDeltaNet) -> Part:
    part = linear_part(mixer) | delta_part(mixer.beta) | output_part(mixer, "in_proj.g")
    return part if mixer.decay is None else part | discretised_part(mixer.decay, "a")


def _deltanet(mixer: mixers.DeltaNet) -> Part:
    return linear_part(mixer) | delta_part(mixer.beta) | _norm_of_heads(mixer)


def _norm_of_heads(mixer: mixers.DeltaNet | mixers.LinearAttention) -> Part:
    return norm_part(mixer.o_norm, "norm", "o_norm", mixer.value_size, mixer.num_heads, mixer.num_heads)


def _kda(mixer: mixers.KDA) -> Part:
    decay = channel_decay_part(mixer.decay, mixer.decay_up.in_features)
    return linear_part(mixer) | decay | delta_part(mixer.beta) | _low_rank_output(mixer)


def _low_rank_output(mixer: mixers.KDA | mixers.GatedDeltaNet2) -> Part:
    """Describe an output with a low-rank gate, or with none."""
    if mixer.g_up is None:
        return output_part(mixer)
    rank = Part({"gate_rank": mixer.g_up.in_features})
    return output_part(mixer, "in_proj.g", "g_up", bias=mixer.g_up.bias is not None) | rank


def _gated_deltanet2(mixer: mixers.GatedDeltaNet2) -> Part:
    subheads, repeats, size = mixer.subheads, mixer.num_heads // mixer.num_key_heads, mixer.subhead_size

    def repeated(x: Tensor) -> Tensor:
        """Repeat the rows of each key head, with all its subheads, for its value heads."""
        return x.unflatten(0, (-1, subheads)).repeat_interleave(repeats, 0).flatten(0, 1)

    def channels(weight: Tensor) -> Tensor:
        return repeated(weight.unflatten(0, (-1, size))).flatten(0, 1)

    strengths = {
        "beta_proj.weight": Rule(("in_proj.b.weight",), channels),
        "beta_proj.bias": Rule(("in_proj.b.weight",), lambda weight: zeros_for(channels(weight))),
        **copied(write_proj="in_proj.w"),
    }
    erase = Part({"delta": float(mixer.erase.most), "erase_per_channel": True}, strengths)
    decay = channel_decay_part(mixer.decay, mixer.decay_up.in_features, repeated)
    return linear_part(mixer) | decay | erase | _low_rank_output(mixer)


def _gla(mixer: mixers.GLA) -> Part:
    """Describe its log decays log σ(a) / normalizer as −softplus(−a) / normalizer."""
    heads, rate = mixer.gate_heads, 1 / mixer.gate_normalizer
    rules = {
        "proj.0.weight": Rule(("in_proj.decay.weight",)),
        "proj.1.weight": Rule(("decay_up.weight",), torch.neg),
        "bias": Rule(("decay_up.bias",), lambda bias: -wide(bias)),
        "rate": Rule((), lambda: torch.full((heads,), rate)),
    }
    decay = decay_part("softplus", rules, mixer.decay_up.in_features, per_channel=True)
    return linear_part(mixer) | decay | output_part(mixer, "in_proj.g")


def _hgrn2(mixer: mixers.HGRN2) -> Part:
    layer, bounds = mixer.site.layer, mixer.lower_bounds
    part = linear_part(mixer, k="f", v="i") | norm_part(mixer.g_norm, "norm", "g_norm", mixer.site.hidden_size)
    if bounds is None:
        return part | decay_part("tied", {}, per_channel=True)
    if type(bounds) is not mixers.LowerBounds:
        raise refusal(bounds, "lower bounds")

    def odds(rows: Tensor) -> Tensor:
        """Return the log odds of the lower bounds of this layer."""
        rows = wide(rows)
        return rows[1 : layer + 1].logsumexp(0) - torch.cat([rows[:1], rows[layer + 1 :]]).logsumexp(0)

    return part | decay_part("bounded", {"odds": Rule(("lower_bounds.weight",), odds)}, per_channel=True)


def _mamba2(mixer: mixers.Mamba2) -> Part:
    part = linear_part(mixer, q="C", k="B", v="x", out="out_proj") | discretised_part(mixer.decay, "dt")
    part |= rms_part(mixer.norm.eps, mixer.norm.groups, Rule(("norm.weight",), wide))
    part |= Part({"step_size": True, "skip": True}, {"skip": Rule(("D",), wide)})
    return part | gate_part("silu", "in_proj.z", before_norm=True)


def _retnet(mixer: mixers.RetNet) -> Part:
    return linear_part(mixer) | constant_part(mixer.decay) | output_part(mixer, "in_proj.g")


def _cosformer2(mixer: mixers.TNL | mixers.CosFormer2) -> Part:
    width, rank = mixer.site.hidden_size, Part({"gate_rank": mixer.g_up.in_features})
    norm = rms_part(mixer.norm_eps, 1, Rule((), lambda: torch.ones(width)))
    return linear_part(mixer) | gate_part("sigmoid", "in_proj.g", "g_up") | rank | norm


def _attention(mixer: mixers.SoftmaxAttention) -> Part:
    check_ones({"scale · √head_dim": mixer.scale / mixer.head_dim**-0.5})
    widths = mixer.in_proj.widths
    settings = {
        "num_heads": mixer.num_heads,
        "num_key_heads": mixer.num_kv_heads,
        "head_dim": mixer.head_dim,
        "window": mixer.window_size,
        "q_norm": None,
        "k_norm": None,
        "gates": widths.get("g", 0),
    }
    rules = biased("o_proj", "o_proj", mixer.o_proj.bias is not None)
    for name in widths:
        rules |= biased(f"{name}_proj", f"in_proj.{name}", mixer.in_proj.bias is not None)
    part = Part(settings, rules) | features_part({"q": mixer.q_features, "k": mixer.k_features})
    for name, norm, heads in (("q_norm", mixer.q_norm, mixer.num_heads), ("k_norm", mixer.k_norm, mixer.num_kv_heads)):
        if norm is not None:
            per_head = mixer.qk_norm_over == "head"
            size, repeats = (mixer.head_dim, heads) if per_head else (heads * mixer.head_dim, 1)
            part |= norm_part(norm, name, name, size, repeats, groups=repeats)
    return part


LINEAR: Mapping[type, Callable[[Any], Part]] = {
    mixers.CosFormer2: _cosformer2,
    mixers.DeltaNet: _deltanet,
    mixers.GLA: _gla,
    mixers.GatedDeltaNet: _gated_deltanet,
    mixers.GatedDeltaNet2: _gated_deltanet2,
    mixers.HGRN2: _hgrn2,
    mixers.KDA: _kda,
    mixers.LinearAttention: lambda mixer: linear_part(mixer) | _norm_of_heads(mixer),
    mixers.Mamba2: _mamba2,
    mixers.RetNet: _retnet,
    mixers.TNL: lambda mixer: _cosformer2(mixer) | constant_part(mixer.decay),
}
ATTENTION: Mapping[type, Callable[[Any], Part]] = {
    mixers.SlidingWindowAttention: _attention,
    mixers.SoftmaxAttention: _attention,
}


def described(mixer: mixers.TokenMixer, post_norm: bool) -> Part:
    """Return the settings of a layer, and the tensors of its mixer.

    Raises:
        UserError: The modelling file cannot compute the mixer, or a component of it.
    """
    name, kinds = type(mixer).__name__, {**LINEAR, **ATTENTION}
    if type(mixer) not in kinds:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise UserError(f"to: transformers cannot hold the mixer {name}; it can hold {names}.")
    part, kind = kinds[type(mixer)](mixer), "linear" if type(mixer) in LINEAR else "attention"
    return Part({"mixer": name, "kind": kind, "settings": part.settings, "post_norm": post_norm}, part.rules)
