"""Parts that models like Llama share: attention with rotary positions and SwiGLU, under the same names."""

from collections.abc import Mapping
from typing import Any

from zoo.conversion import rotary
from zoo.conversion.family import Config, refusal
from zoo.conversion.rules import Rule, Tied, same
from zoo.lm.mlp import SwiGLU
from zoo.lm.model import LanguageModel

TENSORS: tuple[Rule, ...] = (
    same("model.embed_tokens.weight", "embeddings.weight"),
    same("model.norm.weight", "norm.weight"),
    same("lm_head.weight", "lm_head.weight"),
    Tied("lm_head.weight", "model.embed_tokens.weight", unless="lm_head.weight"),
)
MLP = {
    "mlp.gate_proj.weight": "mlp.in_proj.gate.weight",
    "mlp.up_proj.weight": "mlp.in_proj.up.weight",
    "mlp.down_proj.weight": "mlp.down_proj.weight",
}
LAYER = tuple(
    same(f"model.layers.{{layer}}.{theirs}", f"layers.{{layer}}.{ours}")
    for theirs, ours in {
        "input_layernorm.weight": "mixer_norm.weight",
        "post_attention_layernorm.weight": "mlp_norm.weight",
        **MLP,
        **{
            f"self_attn.{name}_proj.{part}": f"mixer.in_proj.{name}.{part}"
            for name in "qkv"
            for part in ("weight", "bias")
        },
        "self_attn.o_proj.weight": "mixer.o_proj.weight",
        "self_attn.o_proj.bias": "mixer.o_proj.bias",
    }.items()
)
KEYS: Mapping[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    **rotary.KEYS,
}
FIXED: Mapping[str, tuple[Any, ...]] = {"hidden_act": ("silu", "swish")}
# dropout is for training; `pretraining_tp` cuts products into parts that are the same
HARMLESS = frozenset({"attention_dropout", "pretraining_tp"})
IGNORED = (r"rotary_emb\.inv_freq$",)


def model_of(config: Config, mixer: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Our `model` config, with one kind of attention in all layers."""
    attention = {
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config["num_key_value_heads"],
        "head_dim": config["head_dim"],
        "qk": {"map": _whole_heads(config)},
        **arguments,
    }
    return {
        "stack": {"class_path": "Uniform", "init_args": {"mixer": {"class_path": mixer, "init_args": attention}}},
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "num_layers": config["num_hidden_layers"],
        "intermediate_size": config["intermediate_size"],
        "norm_eps": config["rms_norm_eps"],
        "tie_embeddings": config["tie_word_embeddings"],
    }


def _whole_heads(config: Config) -> dict[str, Any]:
    """Rotary positions of whole heads.

    Raises:
        UserError: Positions are scaled, turn only a part of each head, or are missing.
    """
    turning = rotary.map_of(config)
    if turning is None:
        raise refusal("rope_theta", None, "a number")
    if turning["init_args"].pop("fraction") != 1:
        raise refusal("rope_parameters", config["rope_parameters"], "the partial_rotary_factor 1")
    return turning


def keys_of(model: LanguageModel) -> dict[str, Any]:
    """Their keys for all but biases and windows."""
    mixer: Any = model.mixers[0]
    mlp = model.mlps[0] if model.mlps else None
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": mlp.down_proj.in_features if isinstance(mlp, SwiGLU) else 1,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": mixer.num_heads,
        "num_key_value_heads": mixer.num_kv_heads,
        "head_dim": mixer.head_dim,
        "rms_norm_eps": model.norm.eps,
        "tie_word_embeddings": model.lm_head is None,
        **rotary.keys_of(mixer.q_features.map),
    }
