"""DeltaNet of flash-linear-attention; with an output gate, or keys and values of two sizes, our Gated DeltaNet."""

from typing import Any

from zoo.conversion import fla, fla_attention
from zoo.conversion.family import Config, Family, refusal
from zoo.lm.model import LanguageModel

# theirs → ours
ACTIVATIONS = {"silu": "silu", "relu": "relu", "elu": "elu1", "identity": "identity"}


def to_ours(config: Config) -> dict[str, Any]:
    heads, activation = config["num_heads"], config["qk_activation"]
    if activation not in ACTIVATIONS:
        raise refusal("qk_activation", activation, " or ".join(ACTIVATIONS))
    key_size, value_size = (round(config["hidden_size"] * config[name]) // heads for name in ("expand_k", "expand_v"))
    arguments = {
        "num_heads": heads,
        "head_dim": key_size,
        "qk": {**fla.convolved(config, ACTIVATIONS[activation]), "norm": "l2"},
        "v": fla.convolved(config),
        "allow_neg_eigval": config["allow_neg_eigval"],
    }
    if key_size == value_size and not config["use_gate"]:
        return fla.model_of(config, "DeltaNet", **arguments, norm_eps=config["norm_eps"])
    wider = {"value_dim": value_size, "decay": None, "output": fla.output_norm(config)}
    return fla.model_of(config, "GatedDeltaNet", **arguments, **wider)


def to_theirs(model: LanguageModel) -> dict[str, Any]:
    mixer: Any = fla_attention.linear_mixers(model)[0]
    spec = mixer.q_features.spec
    return {
        **fla.keys_of(model),
        "num_heads": mixer.num_heads,
        "expand_k": mixer.num_heads * mixer.key_size / model.hidden_size,
        "expand_v": mixer.num_heads * mixer.value_size / model.hidden_size,
        "use_gate": getattr(mixer.o_norm, "gated", False),
        "qk_activation": next(theirs for theirs, ours in ACTIVATIONS.items() if ours == spec.activation),
        "allow_neg_eigval": mixer.beta.most == 2,
        **fla.convolution_of(mixer.q_features.spec),
    }


FAMILY = Family(
    name="fla_deltanet",
    target="fla",
    model_types=("delta_net",),
    architecture="DeltaNetForCausalLM",
    mixers=frozenset({"DeltaNet", "GatedDeltaNet"}) | fla_attention.MIXERS,
    keys={
        **fla.KEYS,
        "num_heads": 16,
        "expand_k": 1.0,
        "expand_v": 1.0,
        "use_gate": False,
        "use_short_conv": True,
        "conv_size": 4,
        "qk_activation": "silu",
        "allow_neg_eigval": False,
    },
    fixed={**fla.FIXED, "use_beta": (True,), "qk_norm": ("l2",), "use_output_norm": (True,)},
    harmless=fla.HARMLESS,
    to_ours=to_ours,
    to_theirs=to_theirs,
    tensors=fla.TENSORS,
    layer_tensors=fla.layer_tensors(
        {
            **{f"{name}_proj.weight": f"in_proj.{name}.weight" for name in "qkvgb"},
            "o_proj.weight": "o_proj.weight",
            **fla.short_convolutions(("q", "q"), ("k", "k"), ("v", "v")),
            **fla.OUTPUT_NORM,
        }
    ),
)
