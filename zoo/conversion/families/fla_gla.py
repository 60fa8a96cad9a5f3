"""GLA of flash-linear-attention."""

from typing import Any

from zoo.conversion import fla, fla_attention
from zoo.conversion.family import Config, Family
from zoo.lm.model import LanguageModel


def to_ours(config: Config) -> dict[str, Any]:
    fla.check_one_to_one(config)
    features = fla.convolved(config) if config["use_short_conv"] else {"conv": 0}
    return fla.model_of(
        config,
        "GLA",
        num_heads=config["num_heads"],
        expand_k=config["expand_k"],
        expand_v=config["expand_v"],
        qk=features,
        v=features,
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
        **fla.convolution_of(mixer.q_features.spec),
    }


FAMILY = Family(
    name="fla_gla",
    target="fla",
    model_types=("gla",),
    architecture="GLAForCausalLM",
    mixers=frozenset({"GLA"}) | fla_attention.MIXERS,
    keys={
        **fla.KEYS,
        "num_heads": 4,
        "num_kv_heads": None,
        "use_output_gate": True,
        "expand_k": 0.5,
        "expand_v": 1.0,
        "use_short_conv": False,
        "conv_size": 4,
    },
    fixed={
        **fla.FIXED,
        "feature_map": (None,),
        "clamp_min": (None,),
        "elementwise_affine": (True,),
        "use_gk": (True,),
        "use_gv": (False,),
    },
    harmless=fla.HARMLESS,
    to_ours=to_ours,
    to_theirs=to_theirs,
    tensors=fla.TENSORS,
    layer_tensors=(
        # with a gate; the second is its name without `fuse_norm`
        fla.mixer_tensor("g_norm_swish_gate.weight", "o_norm.weight", "g_norm.weight"),
        fla.mixer_tensor("g_norm.weight", "o_norm.norm.weight"),
        *fla.layer_tensors(
            {
                "q_proj.weight": "in_proj.q.weight",
                "k_proj.weight": "in_proj.k.weight",
                "v_proj.weight": "in_proj.v.weight",
                "g_proj.weight": "in_proj.g.weight",
                "gk_proj.0.weight": "in_proj.decay.weight",
                "gk_proj.1.weight": "decay_up.weight",
                "gk_proj.1.bias": "decay_up.bias",
                "o_proj.weight": "o_proj.weight",
                **fla.short_convolutions(("q", "q"), ("k", "k"), ("v", "v")),
            }
        ),
    ),
)
