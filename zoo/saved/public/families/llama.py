"""Llama, Mistral and Qwen2 of transformers: attention with rotary positions and SwiGLU, under the same names."""

from collections.abc import Callable, Mapping
from typing import Any

from mixers import FeatureMap, Rotary
from zoo.lm.model import LanguageModel
from zoo.saved.public.family import TIED, Config, Family, Spec, component, keys_of, mlp_size, model_of, refusal, words
from zoo.saved.public.tensors import around_layers, rows

TENSORS = around_layers("model.embed_tokens.weight", "model.norm.weight")
MLP = {
    "mlp.gate_proj.weight": "mlp.in_proj.gate.weight",
    "mlp.up_proj.weight": "mlp.in_proj.up.weight",
    "mlp.down_proj.weight": "mlp.down_proj.weight",
}
_BIASED = ("weight", "bias")
_LAYER = {
    "input_layernorm.weight": "mixer_norm.weight",
    "post_attention_layernorm.weight": "mlp_norm.weight",
    **MLP,
    **{f"self_attn.{x}_proj.{part}": f"mixer.in_proj.{x}.{part}" for x in "qkv" for part in _BIASED},
    **{f"self_attn.o_proj.{part}": f"mixer.o_proj.{part}" for part in _BIASED},
}
# where none of them says a base, not even null, transformers turns by 10,000
ROTARY_KEYS: Config = {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": None}
# images have positions along three axes, between which the channels are divided; those of text agree in all three
_TEXT_ALONE = {"mrope_section", "mrope_interleaved"}
FIXED: Mapping[str, tuple[Any, ...]] = {"hidden_act": ("silu", "swish")}
# dropout is for training; `pretraining_tp` cuts products into parts that are the same
HARMLESS = words("attention_dropout pretraining_tp")


def rotary_map(config: Config) -> Spec | None:
    """The `map` of our Features, from `rope_parameters` or the older keys; None where a base of null turns nothing."""
    older = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if key in config}
    settings = {**older, **(config["rope_scaling"] or {}), **(config["rope_parameters"] or {})}
    kind = {settings.pop(key, "default") for key in ("rope_type", "type")} - {"default", "mrope"}
    base, fraction = settings.pop("rope_theta"), settings.pop("partial_rotary_factor", 1.0)
    if kind or settings.keys() - _TEXT_ALONE:
        key = "rope_parameters" if config["rope_parameters"] else "rope_scaling"
        raise refusal(key, config[key], 'null or the rope_type "default"')
    return None if base is None else component("Rotary", base=float(base), fraction=float(fraction))


def rotary_keys(rotary: FeatureMap | None, partial: bool = False) -> dict[str, Any]:
    """Their keys for the map of our Features; with `partial` also what says how much of a head turns."""
    base = rotary.base if isinstance(rotary, Rotary) else None
    keys: dict[str, Any] = {"rope_theta": base}
    if partial and isinstance(rotary, Rotary):
        keys["partial_rotary_factor"] = rotary.turning / rotary.size
    return {**keys, "rope_parameters": {**keys, "rope_type": "default"}}


def _model(config: Config, mixer: str, **arguments: Any) -> dict[str, Any]:
    """Our `model` config, with one kind of attention in all layers, whose heads turn as a whole."""
    turning = rotary_map(config)
    if turning is None:
        raise refusal("rope_theta", None, "a number")
    if turning["init_args"].pop("fraction") != 1:
        raise refusal("rope_parameters", config["rope_parameters"], "the partial_rotary_factor 1")
    attention = component(
        mixer,
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        qk={"map": turning},
        **arguments,
    )
    stack = component("Uniform", mixer=attention)
    return model_of(config, config["rms_norm_eps"], stack, intermediate_size=config["intermediate_size"])


def _keys_of(model: LanguageModel) -> dict[str, Any]:
    """Their keys for all but biases and windows."""
    mixer: Any = model.mixers[0]
    return {
        **keys_of(model, "rms_norm_eps"),
        "intermediate_size": mlp_size(model) or 1,
        "num_attention_heads": mixer.num_heads,
        "num_key_value_heads": mixer.num_kv_heads,
        "head_dim": mixer.head_dim,
        **rotary_keys(mixer.q_features.map),
    }


_SIZES = dict(vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32)
_HEADS = dict(num_attention_heads=32, num_key_value_heads=None, head_dim=None)


def _family(
    name: str,
    keys: Config,
    to_ours: Callable[[Config], dict[str, Any]],
    key: Callable[[Any], dict[str, Any]],
    mixers: str = "SoftmaxAttention",
    fixed: Mapping[str, tuple[Any, ...]] | None = None,
    harmless: str = "",
) -> Family:
    """A family like Llama; `key` are its own keys for our attention."""
    return Family(
        name=f"hf_{name.lower()}",
        target="huggingface",
        model_types=(name.lower(),),
        architecture=f"{name}ForCausalLM",
        mixers=words(mixers),
        keys={**_SIZES, **_HEADS, "rms_norm_eps": 1e-6, TIED: False, **ROTARY_KEYS, **keys},
        fixed={**FIXED, **(fixed or {})},
        harmless=HARMLESS | words(harmless),
        ignored=(r"rotary_emb\.inv_freq$",),
        to_ours=to_ours,
        to_theirs=lambda model: {**_keys_of(model), **key(model.mixers[0])},
        tensors=TENSORS,
        layer_tensors=tuple(rows(f"model.layers.{{layer}}.{t}", f"layers.{{layer}}.{o}") for t, o in _LAYER.items()),
    )


def _llama(config: Config) -> dict[str, Any]:
    bias = config["attention_bias"]
    return _model(config, "SoftmaxAttention", bias=bias, output_bias=bias)


def _mistral(config: Config) -> dict[str, Any]:
    if config["sliding_window"] is None:
        return _model(config, "SoftmaxAttention")
    return _model(config, "SlidingWindowAttention", window_size=config["sliding_window"])


def _qwen2(config: Config) -> dict[str, Any]:
    if others := set(config["layer_types"] or ()) - {"full_attention"}:
        raise refusal("layer_types", sorted(others), '"full_attention"')
    return _model(config, "SoftmaxAttention", bias=True)


FAMILIES = (
    _family(
        "Llama",
        keys={"attention_bias": False},
        fixed={"mlp_bias": (False,)},
        to_ours=_llama,
        key=lambda mixer: {"attention_bias": mixer.o_proj.bias is not None},
    ),
    _family(
        "Mistral",
        mixers="SoftmaxAttention SlidingWindowAttention",
        keys={"intermediate_size": 14336, "num_key_value_heads": 8, "sliding_window": 4096},
        to_ours=_mistral,
        key=lambda mixer: {"sliding_window": mixer.window_size},
    ),
    _family(
        "Qwen2",
        keys={"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "layer_types": None},
        fixed={"use_sliding_window": (False,)},
        harmless="sliding_window max_window_layers",  # without use_sliding_window
        to_ours=_qwen2,
        key=lambda mixer: {},
    ),
)
