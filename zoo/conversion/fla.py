"""Parts that the models of flash-linear-attention share: the names around the mixers, and the allowed keys of their
configs.
"""

from collections.abc import Mapping
from typing import Any

from mixers import Features
from zoo.conversion import fla_attention
from zoo.conversion.family import Config, refusal
from zoo.conversion.rules import Rows, Rule, Tied, rows, same
from zoo.lm.mlp import SwiGLU
from zoo.lm.model import LanguageModel

TENSORS: tuple[Rule, ...] = (
    same("model.embeddings.weight", "embeddings.weight"),
    same("model.norm.weight", "norm.weight"),
    same("lm_head.weight", "lm_head.weight"),
    Tied("lm_head.weight", "model.embeddings.weight", unless="lm_head.weight"),
)
KEYS: Mapping[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "hidden_ratio": 4.0,
    "intermediate_size": None,
    "norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attn": None,
}
FIXED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("swish",),
    "attnres_block_size": (None,),
}
HARMLESS = frozenset(
    {
        "attn_mode",
        "fuse_norm",
        "fuse_swiglu",
        "fuse_cross_entropy",
        "fuse_linear_cross_entropy",
        "use_l2warp",
    }
)


# with a gate or without
OUTPUT_NORM: Mapping[str, tuple[str, ...]] = {"o_norm.weight": ("o_norm.weight", "o_norm.norm.weight")}


def layer_tensors(names: Mapping[str, str | tuple[str, ...]]) -> tuple[Rows, ...]:
    """The table of a layer: its norms and MLP, and the mixer's tensors (theirs → ours, or where it is in ours).

    Layers of attention, which any model may have, are in it as well.
    """
    around = {
        "attn_norm.weight": "mixer_norm.weight",
        "mlp_norm.weight": "mlp_norm.weight",
        "mlp.gate_proj.weight": "mlp.in_proj.gate.weight",
        "mlp.up_proj.weight": "mlp.in_proj.up.weight",
        "mlp.down_proj.weight": "mlp.down_proj.weight",
    }
    rules = [same(f"model.layers.{{layer}}.{theirs}", f"layers.{{layer}}.{ours}") for theirs, ours in around.items()]
    for theirs, ours in {**fla_attention.TENSORS, **names}.items():
        parts = (ours,) if isinstance(ours, str) else ours
        rules.append(rows(f"model.layers.{{layer}}.attn.{theirs}", *(f"layers.{{layer}}.mixer.{n}" for n in parts)))
    return tuple(rules)


def mixer_tensor(theirs: str, ours: str, *aliases: str) -> Rows:
    """A tensor of the mixer that may have several public names."""
    prefix = "model.layers.{layer}.attn."
    return same(prefix + theirs, "layers.{layer}.mixer." + ours, *(prefix + alias for alias in aliases))


def short_convolutions(*pairs: tuple[str, str]) -> dict[str, str]:
    """The weights and biases of convolutions, as pairs of their stream and ours: (`f`, `k`)."""
    return {
        f"{theirs}_conv1d.{part}": f"{ours}_features.{part}" for theirs, ours in pairs for part in ("weight", "bias")
    }


def model_of(config: Config, mixer: str, **arguments: Any) -> dict[str, Any]:
    """Our `model` config, with one mixer in all layers but those of attention."""
    return {
        "stack": fla_attention.stack_of(config, {"class_path": mixer, "init_args": arguments}),
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "num_layers": config["num_hidden_layers"],
        "intermediate_size": intermediate_size(config),
        "norm_eps": config["norm_eps"],
        "tie_embeddings": config["tie_word_embeddings"],
    }


def intermediate_size(config: Config) -> int:
    """The inner size of the MLPs: as given, or about 2/3 · hidden_ratio · hidden_size."""
    if config["intermediate_size"] is not None:
        return config["intermediate_size"]
    ratio = 4 if config["hidden_ratio"] is None else config["hidden_ratio"]
    return -(int(config["hidden_size"] * ratio * 2 / 3) // -256) * 256


def keys_of(model: LanguageModel) -> dict[str, Any]:
    """Their keys for all parts of the model except the mixers."""
    mlp = model.mlps[0] if model.mlps else None
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "intermediate_size": mlp.down_proj.in_features if isinstance(mlp, SwiGLU) else None,
        "norm_eps": model.norm.eps,
        "tie_word_embeddings": model.lm_head is None,
        "attn": fla_attention.keys_of(model),
    }


def convolved(config: Config, activation: str = "silu") -> dict[str, Any]:
    """Our features of a stream behind their short convolution, or without one if `use_short_conv` is false."""
    taps = config["conv_size"] if config["use_short_conv"] else 0
    return {"conv": taps, "activation": activation}


def convolution_of(features: Features) -> dict[str, Any]:
    """Their keys for the short convolution of a stream."""
    return {"use_short_conv": features.conv > 0, "conv_size": features.conv or 4}


def output_norm(config: Config) -> dict[str, Any]:
    """Our norm of a head's output, with a gate if `use_gate` says so."""
    name = "mixers.GatedRMSNorm" if config["use_gate"] else "mixers.NormOnly"
    return {"class_path": name, "init_args": {"eps": config["norm_eps"]}}


def check_one_to_one(config: Config) -> None:
    """Refuse keys and values that heads share."""
    if config["num_kv_heads"] not in (None, config["num_heads"]):
        raise refusal("num_kv_heads", config["num_kv_heads"], f"null or num_heads, {config['num_heads']}")
