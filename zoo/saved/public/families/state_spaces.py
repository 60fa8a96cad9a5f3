"""Mamba and Mamba2 in the layout of their authors' package `mamba_ssm`, which has no `model_type`; only read."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from zoo.saved.public.families import mamba
from zoo.saved.public.family import TIED, Config, Family, words
from zoo.saved.public.tensors import around_layers

Table = Mapping[str, tuple[str, Any]]
_LAYERS = "ssm_cfg"
_SIZES: Config = {"d_model": 2560, "n_layer": 64, "vocab_size": 50277, "pad_vocab_size_multiple": 8}
_FIXED: Mapping[str, tuple[Any, ...]] = {"rms_norm": (True,), "d_intermediate": (0,), "attn_layer_idx": ([], None)}
# how weights were initialised, and numerical choices
_HARMLESS = (
    "A_init_range chunk_size conv_init dt_init dt_init_floor dt_max dt_min dt_scale use_fast_path use_mem_eff_path"
)
# keys of a layer → those of transformers, and their defaults in `mamba_ssm`
_MAMBA: Table = {
    **{"d_conv": ("conv_kernel", 4), "expand": ("expand", 2), "conv_bias": ("use_conv_bias", True)},
    **{"d_state": ("state_size", 16), "dt_rank": ("time_step_rank", "auto")},
}
_MAMBA2: Table = {
    **{key: value for key, value in _MAMBA.items() if key != "dt_rank"},
    **{"d_state": ("state_size", 128), "headdim": ("head_dim", 64), "ngroups": ("n_groups", 1)},
}


def _layer(config: Config) -> object:
    """Return the kind of layers in a config.json; None if it is of another project."""
    layers = config.get(_LAYERS)
    return layers.get("layer", "Mamba1") if isinstance(layers, Mapping) else None


def _family(name: str, layer: str, table: Table, fixed: Mapping[str, tuple[Any, ...]]) -> Family:
    """Return the family that reads what transformers' family `name` computes; `fixed` are further keys of layers."""
    theirs = next(family for family in mamba.FAMILIES if family.name == f"hf_{name}")

    def to_ours(config: Config) -> dict[str, Any]:
        multiple = max(config["pad_vocab_size_multiple"], 1)
        sizes = {
            "hidden_size": config["d_model"],
            "num_hidden_layers": config["n_layer"],
            "vocab_size": -(config["vocab_size"] // -multiple) * multiple,
            TIED: config["tie_embeddings"],
        }
        layers = {new: config[f"{_LAYERS}.{key}"] for key, (new, _) in table.items()}
        return theirs.to_ours({**theirs.keys, "num_heads": None, **sizes, **layers})

    inner = {"layer": (layer,), "bias": (False,), **fixed}
    return dataclasses.replace(
        theirs,
        name=f"ssm_{name}",
        model_types=(),
        also=lambda config: _layer(config) == layer,
        inside=_LAYERS,
        keys={**_SIZES, "tie_embeddings": True, **{f"{_LAYERS}.{key}": value for key, (_, value) in table.items()}},
        fixed={**_FIXED, **{f"{_LAYERS}.{key}": allowed for key, allowed in inner.items()}},
        harmless=words("fused_add_norm residual_in_fp32") | {f"{_LAYERS}.{key}" for key in _HARMLESS.split()},
        idle={"attn_cfg": "attn_layer_idx"},
        to_ours=to_ours,
        tensors=around_layers("backbone.embedding.weight", "backbone.norm_f.weight"),
    )


FAMILIES = (
    _family("mamba", "Mamba1", _MAMBA, {}),
    _family(
        "mamba2",
        "Mamba2",
        _MAMBA2,
        dict(activation=("swish", "silu"), rmsnorm=(True,), norm_before_gate=(False,), D_has_hdim=(False,))
        | dict(d_ssm=(None,), dt_limit=mamba.NO_LIMIT),
    ),
)
