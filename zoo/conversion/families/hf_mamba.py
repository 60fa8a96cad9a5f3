"""Mamba of transformers."""

from typing import Any

from zoo.conversion import mamba
from zoo.conversion.family import Config, Family, refusal
from zoo.lm.model import LanguageModel


def to_ours(config: Config) -> dict[str, Any]:
    width, inner, rank = config["expand"] * config["hidden_size"], config["intermediate_size"], config["time_step_rank"]
    if inner not in (None, width):
        raise refusal("intermediate_size", inner, f"expand · hidden_size, {width}")
    arguments = {
        "expand": config["expand"],
        "state_dim": config["state_size"],
        "conv": config["conv_kernel"],
        "conv_bias": config["use_conv_bias"],
        "dt_rank": None if rank == "auto" else rank,
    }
    return mamba.model_of(config, config["layer_norm_epsilon"], "Mamba1", arguments)


def to_theirs(model: LanguageModel) -> dict[str, Any]:
    mixer: Any = model.mixers[0]
    return {
        **mamba.keys_of(model),
        "state_size": mixer.state_dim,
        "expand": mamba.expansion(mixer.width, model),
        "intermediate_size": mixer.width,
        "conv_kernel": mixer.x_features.spec.conv,
        "use_conv_bias": mixer.x_features.spec.bias,
        "time_step_rank": mixer.dt_proj.in_features,
        "layer_norm_epsilon": model.norm.eps,
    }


FAMILY = Family(
    name="hf_mamba",
    target="huggingface",
    model_types=("mamba",),
    architecture="MambaForCausalLM",
    mixers=frozenset({"Mamba1"}),
    keys={
        "vocab_size": 50280,
        "hidden_size": 768,
        "num_hidden_layers": 32,
        "state_size": 16,
        "expand": 2,
        "intermediate_size": None,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "time_step_rank": "auto",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
    fixed={"hidden_act": ("silu", "swish"), "use_bias": (False,)},
    harmless=mamba.HARMLESS
    | {
        "time_step_scale",
        "time_step_min",
        "time_step_max",
        "time_step_init_scheme",
        "time_step_floor",
        "use_mambapy",
        "use_associative_scan",
    },
    to_ours=to_ours,
    to_theirs=to_theirs,
    tensors=mamba.TENSORS,
    layer_tensors=mamba.layer_tensors(
        {
            "in_proj.weight": ("in_proj.x.weight", "in_proj.z.weight"),
            "conv1d.weight": ("x_features.weight",),
            "conv1d.bias": ("x_features.bias",),
            "x_proj.weight": ("x_proj.dt.weight", "x_proj.B.weight", "x_proj.C.weight"),
            "dt_proj.weight": ("dt_proj.weight",),
            "dt_proj.bias": ("dt_bias",),
            "A_log": ("A_log",),
            "D": ("D",),
            "out_proj.weight": ("out_proj.weight",),
        }
    ),
)
