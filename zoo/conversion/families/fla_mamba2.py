"""Mamba2 of flash-linear-attention."""

from math import inf
from typing import Any

from zoo.conversion import fla, mamba
from zoo.conversion.family import Config, Family
from zoo.lm.model import LanguageModel


def to_ours(config: Config) -> dict[str, Any]:
    eps = config["norm_eps"]
    return mamba.model_of(config, eps, "Mamba2", mamba.mamba2_arguments(config, eps))


def to_theirs(model: LanguageModel) -> dict[str, Any]:
    return {**mamba.mamba2_keys_of(model), "norm_eps": model.norm.eps}


FAMILY = Family(
    name="fla_mamba2",
    target="fla",
    model_types=("mamba2",),
    also=lambda config: "norm_eps" in config,  # transformers' name for it is layer_norm_epsilon
    architecture="Mamba2ForCausalLM",
    mixers=frozenset({"Mamba2"}),
    keys={
        **mamba.MAMBA2_KEYS,
        "vocab_size": 32000,
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_heads": None,
        "n_groups": 1,
        "norm_eps": 1e-5,
    },
    fixed={
        "hidden_act": ("silu", "swish"),
        "use_bias": (False,),
        "D_has_hdim": (False,),
        "rmsnorm": (True,),
        "norm_before_gate": (False,),
        "dt_limit": ([0.0, inf], [0.0, {"__float__": "Infinity"}]),
    },
    harmless=mamba.HARMLESS | fla.HARMLESS | {"conv_init", "A_init_range", "dt_min", "dt_max", "dt_init_floor"},
    to_ours=to_ours,
    to_theirs=to_theirs,
    tensors=mamba.TENSORS,
    layer_tensors=mamba.MAMBA2_LAYER,
)
