"""RetNet of flash-linear-attention."""

from typing import Any

from zoo.conversion import fla, fla_attention
from zoo.conversion.family import Config, Family, refusal
from zoo.lm.model import LanguageModel


def to_ours(config: Config) -> dict[str, Any]:
    fla.check_one_to_one(config)
    heads = config["num_heads"]
    keys, values = (round(config["hidden_size"] * config[name]) for name in ("expand_k", "expand_v"))
    for name, width in (("expand_k", keys), ("expand_v", values)):
        if not width or width % heads:
            raise refusal(name, config[name], f"widths that num_heads {heads} divides")
    return fla.model_of(
        config,
        "RetNet",
        num_heads=heads,
        head_dim=keys // heads,
        expand_v=values / keys,
        qk={"map": {"class_path": "Rotary", "init_args": {"base": 10000.0}}},
        output_gate=config["use_output_gate"],
        norm_eps=config["norm_eps"],
    )


def to_theirs(model: LanguageModel) -> dict[str, Any]:
    mixer: Any = fla_attention.linear_mixers(model)[0]
    return {
        **fla.keys_of(model),
        "num_heads": mixer.num_heads,
        "use_output_gate": mixer.o_norm.gated,
        "expand_k": mixer.num_heads * mixer.key_size / model.hidden_size,
        "expand_v": mixer.num_heads * mixer.value_size / model.hidden_size,
    }


FAMILY = Family(
    name="fla_retnet",
    target="fla",
    model_types=("retnet",),
    architecture="RetNetForCausalLM",
    mixers=frozenset({"RetNet"}) | fla_attention.MIXERS,
    keys={
        **fla.KEYS,
        "hidden_ratio": 2.0,
        "num_heads": 8,
        "num_kv_heads": None,
        "use_output_gate": True,
        "expand_k": 1.0,
        "expand_v": 2.0,
    },
    fixed={
        **fla.FIXED,
        "feature_map": (None,),
        "elementwise_affine": (True,),
    },
    harmless=fla.HARMLESS | {"use_short_conv", "conv_size"},  # which the model does not hand to its layers
    to_ours=to_ours,
    to_theirs=to_theirs,
    tensors=fla.TENSORS,
    layer_tensors=(
        # with a gate; the second is its name without `fuse_norm`
        fla.mixer_tensor("g_norm_swish_gate.weight", "o_norm.weight", "g_norm.weight"),
        fla.mixer_tensor("g_norm.weight", "o_norm.norm.weight"),
        *fla.layer_tensors(
            {
                **{f"{name}_proj.weight": f"in_proj.{name}.weight" for name in "qkvg"},
                "o_proj.weight": "o_proj.weight",
            }
        ),
    ),
)
