"""Mamba2 of transformers."""

from math import inf
from typing import Any

from zoo.conversion import mamba
from zoo.conversion.family import Config, Family
from zoo.lm.model import LanguageModel


def to_ours(config: Config) -> dict[str, Any]:
    eps = config["layer_norm_epsilon"]
    return mamba.model_of(config, eps, "Mamba2", mamba.mamba2_arguments(config, eps))


def to_theirs(model: LanguageModel) -> dict[str, Any]:
    return {**mamba.mamba2_keys_of(model), "layer_norm_epsilon": model.norm.eps}


FAMILY = Family(
    name="hf_mamba2",
    target="huggingface",
    model_types=("mamba2",),
    also=lambda config: "norm_eps" not in config,  # flash-linear-attention's name for layer_norm_epsilon
    architecture="Mamba2ForCausalLM",
    mixers=frozenset({"Mamba2"}),
    keys={
        **mamba.MAMBA2_KEYS,
        "vocab_size": 32768,
        "hidden_size": 4096,
        "num_hidden_layers": 64,
        "num_heads": 128,
        "n_groups": 8,
        "layer_norm_epsilon": 1e-5,
    },
    fixed={
        "hidden_act": ("silu", "swish"),
        "use_bias": (False,),
        "time_step_limit": ([0.0, inf], [0.0, {"__float__": "Infinity"}]),
    },
    harmless=mamba.HARMLESS | {"time_step_rank", "time_step_min", "time_step_max", "time_step_floor"},
    to_ours=to_ours,
    to_theirs=to_theirs,
    tensors=mamba.TENSORS,
    layer_tensors=mamba.MAMBA2_LAYER,
)
