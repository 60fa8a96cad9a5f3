"""Mamba-3 of state-spaces' package mamba_ssm (SISO), whose config.json has no `model_type`."""

from collections.abc import Mapping
from typing import Any

from kernels import UserError
from mixers import Mamba3, RMSNorm
from mixers.mamba3 import SLOWEST
from zoo.lm.model import LanguageModel
from zoo.saved.public.families.mamba import expansion
from zoo.saved.public.family import TIED, Config, Family, check_kind, component, mlp_size, model_of, refusal, words
from zoo.saved.public.tensors import around_layers, rows, table

_EPS = 1e-5  # of all norms, as the config has no key for it
_KEYS: Config = dict(d_model=2560, d_intermediate=0, n_layer=64, vocab_size=50277, pad_vocab_size_multiple=8) | dict(
    ssm_cfg=None, rms_norm=True, tie_embeddings=True
)
_LAYER_KEYS: Config = dict(d_state=128, expand=2, headdim=64, ngroups=1, rope_fraction=0.5)
_LAYER_FIXED: Mapping[str, Any] = dict(layer="Mamba3", A_floor=SLOWEST, is_outproj_norm=False, is_mimo=False)
_LAYER_HARMLESS = words("chunk_size dropout dt_init_floor dt_max dt_min fuse_pregate_headwise_norm mimo_rank")
_MULTIPLE = 128  # that their MLPs round their inner size up to


def _is_mamba3(config: Config) -> bool:
    layer = config.get("ssm_cfg")
    return isinstance(layer, Mapping) and layer.get("layer") == "Mamba3"


def _to_ours(config: Config) -> dict[str, Any]:
    layer = {**_LAYER_KEYS, **config["ssm_cfg"]}
    for key, value in layer.items():
        if key in _LAYER_FIXED and value != _LAYER_FIXED[key]:
            raise refusal(f"ssm_cfg.{key}", value, f"{_LAYER_FIXED[key]!r}")
        if key not in _LAYER_KEYS.keys() | _LAYER_FIXED.keys() | _LAYER_HARMLESS:
            raise UserError(f"config.json: ssm_cfg has the key {key!r:.80}, which mamba_ssm_mamba3 does not know.")
        check_kind(f"ssm_cfg.{key}", value, _LAYER_KEYS.get(key))
    if layer["rope_fraction"] not in (0.5, 1.0):
        raise refusal("ssm_cfg.rope_fraction", layer["rope_fraction"], "0.5 or 1.0")
    inner, multiple = config["d_intermediate"], config["pad_vocab_size_multiple"]
    mixer = component(
        "Mamba3",
        expand=layer["expand"],
        head_dim=layer["headdim"],
        state_dim=layer["d_state"],
        num_groups=layer["ngroups"],
        rotary_fraction=layer["rope_fraction"],
        norm_eps=_EPS,
    )
    sizes = {
        "vocab_size": -(-config["vocab_size"] // multiple) * multiple,
        "hidden_size": config["d_model"],
        "num_hidden_layers": config["n_layer"],
        TIED: config["tie_embeddings"],
    }
    mlp: dict[str, Any] = {"intermediate_size": -(-inner // _MULTIPLE) * _MULTIPLE} if inner else {"mlp": None}
    norm = "RMSNorm" if config["rms_norm"] else "LayerNorm"
    return model_of(sizes, _EPS, component("Uniform", mixer=mixer), norm=norm, **mlp)


def _to_theirs(model: LanguageModel) -> dict[str, Any]:
    mixer = model.mixers[0]
    assert isinstance(mixer, Mamba3)
    layer = {
        "d_state": mixer.key_size,
        "expand": expansion(mixer.num_heads * mixer.value_size, model),
        "headdim": mixer.value_size,
        "ngroups": mixer.num_key_heads,
        "rope_fraction": 0.5 if mixer.pairs < mixer.key_size // 2 else 1.0,
    }
    return {
        "d_model": model.hidden_size,
        "d_intermediate": mlp_size(model) or 0,
        "n_layer": model.num_layers,
        "vocab_size": model.vocab_size,
        "pad_vocab_size_multiple": 1,
        "ssm_cfg": {**_LAYER_FIXED, **layer},
        "rms_norm": isinstance(model.norm, RMSNorm),
        "tie_embeddings": model.lm_head is None,
    }


_STREAMS = ("z", "x", "B", "C", "dt", "A", "trap", "angles")
_PARTS = ("weight", "bias")  # biases of LayerNorm
_NAMES = {
    **{f"norm.{part}": f"mixer_norm.{part}" for part in _PARTS},
    **{f"norm2.{part}": f"mlp_norm.{part}" for part in _PARTS},
    "mixer.in_proj.weight": " ".join(f"mixer.in_proj.{x}.weight" for x in _STREAMS),
    "mixer.dt_bias": "mixer.decay.dt_bias",
    "mixer.B_norm.weight": "mixer.k_norm.weight",
    "mixer.C_norm.weight": "mixer.q_norm.weight",
    "mixer.D": "mixer.D",
    "mixer.out_proj.weight": "mixer.out_proj.weight",
    "mlp.fc1.weight": "mlp.in_proj.up.weight mlp.in_proj.gate.weight",
    "mlp.fc2.weight": "mlp.down_proj.weight",
}
_LAYER, _OURS = "backbone.layers.{layer}.", "layers.{layer}."

FAMILIES = (
    Family(
        name="mamba_ssm_mamba3",
        target="mamba_ssm",
        model_types=(),
        architecture="MambaLMHeadModel",
        mixers=frozenset({"Mamba3"}),
        keys=_KEYS,
        fixed={"attn_layer_idx": ([], None)},
        harmless=words("attn_cfg fused_add_norm residual_in_fp32"),
        also=_is_mamba3,
        to_ours=_to_ours,
        to_theirs=_to_theirs,
        tensors=(
            *around_layers("backbone.embedding.weight", "backbone.norm_f.weight"),
            rows("backbone.norm_f.bias", "norm.bias"),
        ),
        layer_tensors=(
            *table(_NAMES, _LAYER),
            rows(f"{_LAYER}mixer.B_bias", f"{_OURS}mixer.k_bias", shape=("num_heads", 1, -1)),
            rows(f"{_LAYER}mixer.C_bias", f"{_OURS}mixer.q_bias", shape=("num_heads", 1, -1)),
        ),
    ),
)
