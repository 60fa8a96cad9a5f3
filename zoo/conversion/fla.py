"""What the models of flash-linear-attention share: the names around the mixers, and what their configs may say."""

import string
from collections.abc import Mapping
from typing import Any

from kernels import UserError
from mixers import Features, Rotary, SoftmaxAttention, TokenMixer
from zoo.conversion.family import Config, check_kind, refusal
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


# what the layers of a hybrid may be that `attn` lists
ATTENTION = frozenset({"SoftmaxAttention", "SlidingWindowAttention"})
# what `attn` says of them → the value where it does not; of null, a value of its kind
_ATTENTION_KEYS: Mapping[str, Any] = {
    "qkv_bias": False,
    "rope_theta": 10000.0,
    "num_kv_heads": None,
    "window_size": None,
}
_ATTENTION_KINDS: Mapping[str, Any] = {**_ATTENTION_KEYS, "num_heads": 1, "num_kv_heads": 1, "window_size": 1}
_LINEAR, _OTHERS = "L", "".join(c for c in string.ascii_letters if c != "L")
_ATTENTION_TENSORS = {
    **{f"{x}_proj.{part}": f"in_proj.{x}.{part}" for x in "qkv" for part in ("weight", "bias")},
    "o_proj.weight": "o_proj.weight",
}

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
    for theirs, ours in {**_ATTENTION_TENSORS, **names}.items():
        parts = (ours,) if isinstance(ours, str) else ours
        rules.append(rows(f"model.layers.{{layer}}.attn.{theirs}", *(f"layers.{{layer}}.mixer.{n}" for n in parts)))
    return tuple(rules)


def mixer_tensor(theirs: str, ours: str, *aliases: str) -> Rows:
    """A tensor of the mixer that may have several names of theirs."""
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
        "stack": _stack(config, {"class_path": mixer, "init_args": arguments}),
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "num_layers": config["num_hidden_layers"],
        "intermediate_size": intermediate_size(config),
        "norm_eps": config["norm_eps"],
        "tie_embeddings": config["tie_word_embeddings"],
    }


def _stack(config: Config, mixer: dict[str, Any]) -> dict[str, Any]:
    """Our stack of a mixer, and of attention where `attn` says so.

    Raises:
        UserError: `attn` is not what it should be, or leaves no layer to the mixer.
    """
    given, count = config["attn"], config["num_hidden_layers"]
    if given is None:
        return {"class_path": "Uniform", "init_args": {"mixer": mixer}}
    specs = given if isinstance(given, list) else [given]
    if len(specs) > len(_OTHERS):
        raise refusal("attn", f"{len(specs)} settings", f"{len(_OTHERS)} at most")
    pattern, mixers = [_LINEAR] * count, {_LINEAR: mixer}
    for letter, spec in zip(_OTHERS, specs, strict=False):
        if not isinstance(spec, Mapping) or not {"layers", "num_heads"} <= spec.keys() <= _ATTENTION_KINDS.keys() | {
            "layers"
        }:
            known = ", ".join(["layers", *_ATTENTION_KINDS])
            raise refusal("attn", spec, f"settings of attention with layers and num_heads, and no others than {known}")
        for key, kind in _ATTENTION_KINDS.items():
            check_kind(f"attn.{key}", spec.get(key), kind)
        layers = spec["layers"]
        if not isinstance(layers, list) or not all(type(i) is int and 0 <= i < count for i in layers):
            raise refusal("attn.layers", layers, f"a list of layers from 0 to {count - 1}")
        for layer in layers:
            if pattern[layer] != _LINEAR:
                raise refusal("attn.layers", layers, "each layer once")
            pattern[layer] = letter
        mixers[letter] = _attention({**_ATTENTION_KEYS, **{key: v for key, v in spec.items() if v is not None}})
    if _LINEAR not in pattern:
        raise refusal("attn.layers", "all layers", "hybrids, so some layers that are not of attention")
    used = {letter: mixers[letter] for letter in sorted(set(pattern))}
    return {"class_path": "Pattern", "init_args": {"pattern": "".join(pattern), "mixers": used}}


def _attention(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The config of our attention for theirs."""
    arguments = {
        "num_heads": spec["num_heads"],
        "num_kv_heads": spec["num_kv_heads"],
        "qk": {"map": {"class_path": "Rotary", "init_args": {"base": float(spec["rope_theta"])}}},
        "bias": spec["qkv_bias"],
    }
    if (window := spec["window_size"]) is None:
        return {"class_path": "SoftmaxAttention", "init_args": arguments}
    return {"class_path": "SlidingWindowAttention", "init_args": {**arguments, "window_size": window}}


def _attention_keys(model: LanguageModel) -> dict[str, Any] | list[dict[str, Any]] | None:
    """Their `attn`: one entry, or several where layers differ."""
    found: list[dict[str, Any]] = []
    for layer, mixer in enumerate(model.mixers):
        if not isinstance(mixer, SoftmaxAttention):
            continue
        turning = mixer.q_features.map
        settings = {
            "num_heads": mixer.num_heads,
            "num_kv_heads": mixer.num_kv_heads,
            "qkv_bias": mixer.in_proj.bias is not None,
            "window_size": mixer.window_size,
            "rope_theta": turning.base if isinstance(turning, Rotary) else _ATTENTION_KEYS["rope_theta"],
        }
        alike = next((spec for spec in found if spec.items() >= settings.items()), None)
        if alike is None:
            found.append(alike := {"layers": [], **settings})
        alike["layers"].append(layer)
    return found[0] if len(found) == 1 else found or None


def linear_mixers(model: LanguageModel) -> list[TokenMixer]:
    """The mixers of the layers that are not of attention.

    Raises:
        UserError: All are.
    """
    if not (found := [mixer for mixer in model.mixers if not isinstance(mixer, SoftmaxAttention)]):
        raise UserError("to: fla has no models of attention alone here; choose huggingface.")
    return found


def intermediate_size(config: Config) -> int:
    """The inner size of the MLPs: as given, or about 2/3 · hidden_ratio · hidden_size."""
    if config["intermediate_size"] is not None:
        return config["intermediate_size"]
    ratio = 4 if config["hidden_ratio"] is None else config["hidden_ratio"]
    return -(int(config["hidden_size"] * ratio * 2 / 3) // -256) * 256


def keys_of(model: LanguageModel) -> dict[str, Any]:
    """Their keys for what stands around the mixers."""
    mlp = model.mlps[0] if model.mlps else None
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "intermediate_size": mlp.down_proj.in_features if isinstance(mlp, SwiGLU) else None,
        "norm_eps": model.norm.eps,
        "tie_word_embeddings": model.lm_head is None,
        "attn": _attention_keys(model),
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
