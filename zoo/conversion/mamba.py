"""Parts that the layouts of Mamba and Mamba2 share."""

from collections.abc import Mapping
from typing import Any

from kernels import UserError
from zoo.conversion.family import Config, refusal
from zoo.conversion.rules import Rows, Rule, Tied, rows, same
from zoo.lm.model import LanguageModel

TENSORS: tuple[Rule, ...] = (
    same("backbone.embeddings.weight", "embeddings.weight"),
    same("backbone.norm_f.weight", "norm.weight"),
    same("lm_head.weight", "lm_head.weight"),
    Tied("lm_head.weight", "backbone.embeddings.weight", unless="lm_head.weight"),
)
# how originals were made, and numerical choices; the layout of a public model ignores what an original config adds
HARMLESS = frozenset(
    {
        "chunk_size",
        "d_inner",
        "d_model",
        "fused_add_norm",
        "n_layer",
        "pad_vocab_size_multiple",
        "rescale_prenorm_residual",
        "residual_in_fp32",
        "rms_norm",
        "ssm_cfg",
    }
)


def layer_tensors(names: Mapping[str, tuple[str, ...]]) -> tuple[Rows, ...]:
    """The table of a layer: its norm, and the mixer's tensors (theirs → ours, in the order of their rows)."""
    norm = same("backbone.layers.{layer}.norm.weight", "layers.{layer}.mixer_norm.weight")
    prefix = "layers.{layer}.mixer."
    return (norm, *(rows(f"backbone.{prefix}{t}", *(prefix + name for name in ours)) for t, ours in names.items()))


MAMBA2_LAYER = layer_tensors(
    {
        "in_proj.weight": tuple(f"in_proj.{part}.weight" for part in ("z", "x", "B", "C", "dt")),
        "conv1d.weight": ("v_features.weight", "k_features.weight", "q_features.weight"),
        "conv1d.bias": ("v_features.bias", "k_features.bias", "q_features.bias"),
        "A_log": ("decay.A_log",),
        "dt_bias": ("decay.dt_bias",),
        "D": ("D",),
        "norm.weight": ("norm.weight",),
        "out_proj.weight": ("out_proj.weight",),
    }
)
MAMBA2_KEYS: Mapping[str, Any] = {
    "head_dim": 64,
    "state_size": 128,
    "expand": 2,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "tie_word_embeddings": False,
}


def model_of(config: Config, eps: float, mixer: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Our `model` config, with one mixer in all layers and no MLPs."""
    return {
        "stack": {"class_path": "Uniform", "init_args": {"mixer": {"class_path": mixer, "init_args": dict(arguments)}}},
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "num_layers": config["num_hidden_layers"],
        "mlp": None,
        "norm_eps": eps,
        "tie_embeddings": config["tie_word_embeddings"],
    }


def keys_of(model: LanguageModel) -> dict[str, Any]:
    """Their keys for all parts of the model except the mixers."""
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "tie_word_embeddings": model.lm_head is None,
    }


def mamba2_arguments(config: Config, eps: float) -> dict[str, Any]:
    """The arguments of our mixer."""
    width, heads = config["expand"] * config["hidden_size"], config["num_heads"]
    if heads is not None and heads * config["head_dim"] != width:
        raise refusal("num_heads", heads, f"expand · hidden_size / head_dim, {width / config['head_dim']:g}")
    return {
        "expand": config["expand"],
        "head_dim": config["head_dim"],
        "state_dim": config["state_size"],
        "num_groups": config["n_groups"],
        "xbc": {"conv": config["conv_kernel"], "bias": config["use_conv_bias"], "activation": "silu"},
        "norm_eps": eps,
    }


def mamba2_keys_of(model: LanguageModel) -> dict[str, Any]:
    """Their keys for our mixer."""
    mixer: Any = model.mixers[0]
    return {
        **keys_of(model),
        "num_heads": mixer.num_heads,
        "head_dim": mixer.value_size,
        "state_size": mixer.key_size,
        "n_groups": mixer.num_key_heads,
        "expand": expansion(mixer.num_heads * mixer.value_size, model),
        "conv_kernel": mixer.v_features.spec.conv,
        "use_conv_bias": mixer.v_features.spec.bias,
    }


def expansion(width: int, model: LanguageModel) -> int:
    """Return the inner width of a layer, in multiples of the width of the residual stream.

    Raises:
        UserError: It is not an integer.
    """
    if width % model.hidden_size:
        raise UserError(f"to: an inner width of {width} is not a multiple of hidden_size {model.hidden_size}.")
    return width // model.hidden_size
