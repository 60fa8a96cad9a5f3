"""Gated DeltaNet of flash-linear-attention."""

from typing import Any

from zoo.conversion import fla, fla_attention
from zoo.conversion.family import Config, Family
from zoo.lm.model import LanguageModel


def to_ours(config: Config) -> dict[str, Any]:
    features, key_heads = fla.convolved(config), config["num_heads"]
    return fla.model_of(
        config,
        "GatedDeltaNet",
        num_heads=key_heads if config["num_v_heads"] is None else config["num_v_heads"],
        num_key_heads=key_heads,
        head_dim=config["head_dim"],
        value_dim=int(config["head_dim"] * config["expand_v"]),
        qk={**features, "norm": "l2"},
        v=features,
        output=fla.output_norm(config),
        allow_neg_eigval=config["allow_neg_eigval"],
    )


def to_theirs(model: LanguageModel) -> dict[str, Any]:
    mixer: Any = fla_attention.linear_mixers(model)[0]
    return {
        **fla.keys_of(model),
        "num_heads": mixer.num_key_heads,
        "num_v_heads": mixer.num_heads,
        "head_dim": mixer.key_size,
        "expand_v": mixer.value_size / mixer.key_size,
        "use_gate": mixer.o_norm.gated,
        "allow_neg_eigval": mixer.beta.most == 2,
        **fla.convolution_of(mixer.q_features.spec),
    }


FAMILY = Family(
    name="fla_gated_deltanet",
    target="fla",
    model_types=("gated_deltanet",),
    architecture="GatedDeltaNetForCausalLM",
    mixers=frozenset({"GatedDeltaNet"}) | fla_attention.MIXERS,
    keys={
        **fla.KEYS,
        "num_hidden_layers": 21,
        "num_heads": 6,
        "num_v_heads": None,
        "head_dim": 256,
        "expand_v": 2.0,
        "use_gate": True,
        "use_short_conv": True,
        "conv_size": 4,
        "allow_neg_eigval": False,
    },
    fixed={**fla.FIXED, "output_gate_activation": ("swish", "silu")},
    harmless=fla.HARMLESS,
    to_ours=to_ours,
    to_theirs=to_theirs,
    tensors=fla.TENSORS,
    layer_tensors=fla.layer_tensors(
        {
            **{f"{name}_proj.weight": f"in_proj.{name}.weight" for name in "qkvgab"},
            "A_log": "decay.A_log",
            "dt_bias": "decay.dt_bias",
            "o_proj.weight": "o_proj.weight",
            **fla.short_convolutions(("q", "q"), ("k", "k"), ("v", "v")),
            **fla.OUTPUT_NORM,
        }
    ),
)
