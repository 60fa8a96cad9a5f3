"""Shared parts of hybrids of Gated DeltaNet and attention in the layouts of Qwen3-Next, Qwen3.5 and OLMo-Hybrid."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from mixers import GatedDeltaNet, SoftmaxAttention
from zoo.conversion import llama, rotary
from zoo.conversion.family import Config, refusal
from zoo.conversion.rules import Rows, Rule, rows
from zoo.lm.mlp import SwiGLU
from zoo.lm.model import LanguageModel

LINEAR, FULL = "GatedDeltaNet", "SoftmaxAttention"
_KINDS = {"linear_attention": "L", "full_attention": "A"}

KEYS: Mapping[str, Any] = {
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "layer_types": None,
    "linear_conv_kernel_dim": 4,
    **rotary.KEYS,
}


def in_layer(theirs: str, *ours: str, per: str | None = None, of: str | None = None) -> Rows:
    """The rule of a tensor of a layer, without what comes before in the names."""
    return rows(f"model.layers.{{layer}}.{theirs}", *(f"layers.{{layer}}.{name}" for name in ours), per=per, of=of)


def in_mixer(of: str, where: str, names: Mapping[str, str]) -> tuple[Rows, ...]:
    """The rules of tensors of one kind of mixer (theirs → ours), which theirs calls `where`."""
    return tuple(in_layer(f"{where}.{theirs}", f"mixer.{ours}", of=of) for theirs, ours in names.items())


MLP: tuple[Rows, ...] = tuple(in_layer(theirs, ours) for theirs, ours in llama.MLP.items())
ATTENTION: tuple[Rows, ...] = in_mixer(
    FULL,
    "self_attn",
    {
        **{f"{x}_proj.{part}": f"in_proj.{x}.{part}" for x in ("k", "v") for part in ("weight", "bias")},
        **{f"o_proj.{part}": f"o_proj.{part}" for part in ("weight", "bias")},
        "q_norm.weight": "q_norm.weight",
        "k_norm.weight": "k_norm.weight",
    },
)
GATES: tuple[Rows, ...] = in_mixer(LINEAR, "linear_attn", {"A_log": "decay.A_log", "dt_bias": "decay.dt_bias"})


def with_prefix(prefix: str, rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Rules that also know their tensors under `prefix` in place of `model.`, as in a model of more than text."""
    return tuple(
        dataclasses.replace(rule, aliases=(prefix + rule.theirs.removeprefix("model."),))
        if isinstance(rule, Rows) and rule.theirs.startswith("model.")
        else rule
        for rule in rules
    )


def model_of(config: Config, linear: dict[str, Any], full: dict[str, Any], post_norm: bool = False) -> dict[str, Any]:
    """Our `model` config.

    Args:
        config: Their keys.
        linear: Arguments of the Gated DeltaNet, in addition to its sizes.
        full: Arguments of the attention, in addition to the number of its heads, positions and biases.
        post_norm: Whether attention layers have their norms after mixer and MLP.
    """
    taps, bias = config["linear_conv_kernel_dim"], config["attention_bias"]
    if taps < 1:
        raise refusal("linear_conv_kernel_dim", taps, "1 or more")
    sizes = {
        "num_heads": config["linear_num_value_heads"],
        "num_key_heads": config["linear_num_key_heads"],
        "head_dim": config["linear_key_head_dim"],
        "value_dim": config["linear_value_head_dim"],
        "qk": {"conv": taps, "activation": "silu", "norm": "l2"},
        "v": {"conv": taps, "activation": "silu"},
    }
    heads = {
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config["num_key_value_heads"],
        "qk": {"map": rotary.map_of(config)},
        "bias": bias,
        "output_bias": bias,
    }
    letters = _letters(config)
    mixers = {
        "L": {"class_path": LINEAR, "init_args": {**sizes, **linear}},
        "A": {"class_path": FULL, "init_args": {**heads, **full}},
    }
    stack: dict[str, Any] = {"pattern": letters, "mixers": {letter: mixers[letter] for letter in sorted(set(letters))}}
    if post_norm and "A" in letters:
        stack["post_norm"] = "A"
    return {
        "stack": {"class_path": "Pattern", "init_args": stack},
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "num_heads": config["num_attention_heads"],
        "num_layers": config["num_hidden_layers"],
        "intermediate_size": config["intermediate_size"],
        "norm_eps": config["rms_norm_eps"],
        "tie_embeddings": config["tie_word_embeddings"],
    }


def kinds_of(config: Config) -> list[str]:
    """The kind of each layer, by default full attention at every fourth.

    Raises:
        UserError: There is another kind, or not one for each layer.
    """
    types, count = config["layer_types"], config["num_hidden_layers"]
    if types is None:
        every = config.get("full_attention_interval", 4)
        types = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(count)]
    if len(types) != count or set(types) - set(_KINDS):
        raise refusal("layer_types", types, f"{' and '.join(_KINDS)}, one of them for each of the {count} layers")
    return types


def _letters(config: Config) -> str:
    """A letter for the kind of each layer, up to where they repeat."""
    letters = "".join(_KINDS[kind] for kind in kinds_of(config))
    period = next(n for n in range(1, len(letters) + 1) if (letters[:n] * len(letters))[: len(letters)] == letters)
    return letters[:period]


def keys_of(model: LanguageModel) -> dict[str, Any]:
    """Their keys, as far as all of them agree."""
    mlp = model.mlps[0] if model.mlps else None
    keys: dict[str, Any] = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "intermediate_size": mlp.down_proj.in_features if isinstance(mlp, SwiGLU) else None,
        "rms_norm_eps": model.norm.eps,
        "tie_word_embeddings": model.lm_head is None,
        "layer_types": [
            "full_attention" if isinstance(mixer, SoftmaxAttention) else "linear_attention" for mixer in model.mixers
        ],
    }
    if linear := next((mixer for mixer in model.mixers if isinstance(mixer, GatedDeltaNet)), None):
        keys |= {
            "linear_num_value_heads": linear.num_heads,
            "linear_num_key_heads": linear.num_key_heads,
            "linear_key_head_dim": linear.key_size,
            "linear_value_head_dim": linear.value_size,
            "linear_conv_kernel_dim": linear.q_features.spec.conv,
        }
    if full := attention_of(model):
        keys |= {
            "num_attention_heads": full.num_heads,
            "num_key_value_heads": full.num_kv_heads,
            "attention_bias": full.o_proj.bias is not None,
        }
    return keys


def attention_of(model: LanguageModel) -> SoftmaxAttention | None:
    """The first attention layer, if there is one."""
    return next((mixer for mixer in model.mixers if isinstance(mixer, SoftmaxAttention)), None)
