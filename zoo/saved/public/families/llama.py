"""Llama, Mistral, Qwen2 and Qwen3 of transformers: attention with rotary positions and SwiGLU, under the same names."""

from collections.abc import Callable, Mapping
from typing import Any

from mixers import SoftmaxAttention
from zoo.lm.model import LanguageModel
from zoo.saved.public.families.rotary import ROTARY_KEYS, rotary_keys, rotary_map
from zoo.saved.public.family import (
    TIED,
    Config,
    Family,
    Spec,
    check_kind,
    component,
    keys_of,
    mlp_size,
    model_of,
    pattern_of,
    refusal,
    words,
)
from zoo.saved.public.tensors import around_layers, table

TENSORS = around_layers("model.embed_tokens.weight", "model.norm.weight")
MLP = {
    "mlp.gate_proj.weight": "mlp.in_proj.gate.weight",
    "mlp.up_proj.weight": "mlp.in_proj.up.weight",
    "mlp.down_proj.weight": "mlp.down_proj.weight",
}
NORMS = {"input_layernorm.weight": "mixer_norm.weight", "post_attention_layernorm.weight": "mlp_norm.weight"}
# what a layer lacks of these does not count
ATTENTION = {
    **{f"{x}_proj.{part}": f"in_proj.{x}.{part}" for x in "qkv" for part in ("weight", "bias")},
    **{f"o_proj.{part}": f"o_proj.{part}" for part in ("weight", "bias")},
    **{f"{x}_norm.weight": f"{x}_norm.weight" for x in "qk"},
}
_LAYER = {**NORMS, **MLP, **{f"self_attn.{theirs}": f"mixer.{ours}" for theirs, ours in ATTENTION.items()}}
FIXED: Mapping[str, tuple[Any, ...]] = {"hidden_act": ("silu", "swish")}
# dropout is for training; `pretraining_tp` cuts products into parts that are the same
HARMLESS = words("attention_dropout pretraining_tp")


def _attention(config: Config, mixer: str, **arguments: Any) -> Spec:
    """Our attention, whose heads turn as a whole."""
    turning = rotary_map(config, partial=False)
    if turning is None:
        raise refusal("rope_theta", None, "a number")
    del turning["init_args"]["fraction"]
    return attention(config, turning, mixer, **arguments)


def attention(config: Config, rotary: Spec | None, mixer: str = "SoftmaxAttention", **arguments: Any) -> Spec:
    """Return our attention for the keys that all families call the same; `arguments` are added to its arguments."""
    bias = config.get("attention_bias", False)
    shared = {
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config["num_key_value_heads"],
        "head_dim": config.get("head_dim"),
        **{"qk": {"map": rotary}, "bias": bias, "output_bias": bias},
    }
    return component(mixer, **{**shared, **arguments})


def _model(config: Config, stack: Spec) -> dict[str, Any]:
    """Our `model` config."""
    return model_of(config, config["rms_norm_eps"], stack, intermediate_size=config["intermediate_size"])


def _uniform(config: Config, mixer: str, **arguments: Any) -> dict[str, Any]:
    """Our `model` config, with one kind of attention in all layers."""
    return _model(config, component("Uniform", mixer=_attention(config, mixer, **arguments)))


def _keys_of(model: LanguageModel) -> dict[str, Any]:
    """Their keys for all but windows."""
    mixer = _attentions(model)[0]
    around = {**keys_of(model, "rms_norm_eps"), "intermediate_size": mlp_size(model) or 1}
    return {**around, **attention_keys(mixer), **rotary_keys(mixer.q_features.map)}


def attention_keys(full: SoftmaxAttention | None) -> dict[str, Any]:
    """Return the keys for our attention, except those of positions; none without attention."""
    if full is None:
        return {}
    return {
        "num_attention_heads": full.num_heads,
        "num_key_value_heads": full.num_kv_heads,
        "head_dim": full.head_dim,
        "attention_bias": full.o_proj.bias is not None,
    }


_SIZES = dict(vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32)
_HEADS = dict(num_attention_heads=32, num_key_value_heads=None, head_dim=None)


def _family(
    name: str,
    keys: Config,
    to_ours: Callable[[Config], dict[str, Any]],
    key: Callable[[LanguageModel], dict[str, Any]] = lambda model: {},
    mixers: str = "SoftmaxAttention",
    fixed: Mapping[str, tuple[Any, ...]] | None = None,
) -> Family:
    """A family like Llama; `key` are its own keys for our model."""
    shared = {**ROTARY_KEYS, "partial_rotary_factor": None, "rms_norm_eps": 1e-6, TIED: False}
    keys = {**_SIZES, **_HEADS, **shared, **keys}

    def to_theirs(model: LanguageModel) -> dict[str, Any]:
        theirs = {**_keys_of(model), **key(model)}
        return {name: value for name, value in theirs.items() if name in keys}  # not all have `attention_bias`

    return Family(
        name=f"hf_{name.lower()}",
        target="huggingface",
        model_types=(name.lower(),),
        architecture=f"{name}ForCausalLM",
        mixers=words(mixers),
        keys=keys,
        fixed={**FIXED, **(fixed or {})},
        harmless=HARMLESS,
        ignored=(r"rotary_emb\.inv_freq$",),
        to_ours=to_ours,
        to_theirs=to_theirs,
        tensors=TENSORS,
        layer_tensors=table(_LAYER),
    )


def _mistral(config: Config) -> dict[str, Any]:
    if config["sliding_window"] is None:
        return _uniform(config, "SoftmaxAttention")
    return _uniform(config, "SlidingWindowAttention", window_size=config["sliding_window"])


_FULL, _WINDOW = "full_attention", "sliding_attention"


def _with_windows(config: Config, **arguments: Any) -> dict[str, Any]:
    """Our `model` config, where some layers may have a sliding window; `arguments` are those of our attention."""
    types, count = config["layer_types"], config["num_hidden_layers"]
    window = config["sliding_window"] if config["use_sliding_window"] else None
    check_kind("max_window_layers", config["max_window_layers"], 0)
    if types is None:
        first = 28 if config["max_window_layers"] is None else config["max_window_layers"]
        first = count if window is None else first
        types = [_FULL if layer < first else _WINDOW for layer in range(count)]
    allowed = {_FULL} if window is None else {_FULL, _WINDOW}
    if len(types) != count or set(types) - allowed:
        raise refusal(
            "layer_types", types, f"{' and '.join(sorted(allowed))}, one of them for each of the {count} layers"
        )
    mixers = {_FULL: ("A", _attention(config, "SoftmaxAttention", **arguments))}
    if _WINDOW in types:
        mixers[_WINDOW] = "W", _attention(config, "SlidingWindowAttention", **arguments, window_size=window)
    return _model(config, pattern_of(types, mixers))


def _qwen2_keys(model: LanguageModel) -> dict[str, Any]:
    types = [_FULL if mixer.window_size is None else _WINDOW for mixer in _attentions(model)]
    windows = [mixer.window_size for mixer in _attentions(model) if mixer.window_size is not None]
    return {
        "layer_types": types,
        "use_sliding_window": bool(windows),
        "sliding_window": windows[0] if windows else None,
        # which older versions read in place of the kinds of layers
        "max_window_layers": types.index(_WINDOW) if windows else len(types),
    }


def _attentions(model: LanguageModel) -> list[SoftmaxAttention]:
    return [mixer for mixer in model.mixers if isinstance(mixer, SoftmaxAttention)]


FAMILIES = (
    _family(
        "Llama",
        keys={"attention_bias": False},
        fixed={"mlp_bias": (False,)},
        to_ours=lambda config: _uniform(config, "SoftmaxAttention"),
    ),
    _family(
        "Mistral",
        mixers="SoftmaxAttention SlidingWindowAttention",
        keys={"intermediate_size": 14336, "num_key_value_heads": 8, "sliding_window": 4096}
        | {"max_position_embeddings": 131072},
        to_ours=_mistral,
        key=lambda model: {"sliding_window": _attentions(model)[0].window_size},
    ),
    _family(
        "Qwen2",
        mixers="SoftmaxAttention SlidingWindowAttention",
        keys={"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "layer_types": None}
        | {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": None}
        | {"max_position_embeddings": 32768},
        to_ours=lambda config: _with_windows(config, bias=True),
        key=_qwen2_keys,
    ),
    _family(
        "Qwen3",
        mixers="SoftmaxAttention SlidingWindowAttention",
        keys={"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "head_dim": 128}
        | {"layer_types": None, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": None}
        | {"max_position_embeddings": 32768, "attention_bias": False},
        to_ours=lambda config: _with_windows(config, qk_norm=component("RMSNorm", eps=config["rms_norm_eps"])),
        key=_qwen2_keys,
    ),
)
