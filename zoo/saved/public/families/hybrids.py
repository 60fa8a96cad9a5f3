"""Qwen3.5 and OLMo-Hybrid of transformers: hybrids of Gated DeltaNet and attention, without experts."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mixers import GatedDeltaNet, SoftmaxAttention
from zoo.lm.model import LanguageModel
from zoo.saved.public.families import llama
from zoo.saved.public.families.rotary import ROTARY_KEYS, rotary_keys, rotary_map
from zoo.saved.public.family import (
    TIED,
    Config,
    Family,
    component,
    keys_of,
    mlp_size,
    model_of,
    pattern_of,
    refusal,
    words,
)
from zoo.saved.public.tensors import LAYER, OUR_LAYER, Recut, Rows, Rule, table

_LINEAR, _FULL = "GatedDeltaNet", "SoftmaxAttention"
KINDS = {"linear_attention": "L", "full_attention": "A"}
_COMMON: Any = {"target": "huggingface", "mixers": frozenset({_LINEAR, _FULL})}
_OPTIONS = dict(rms_norm_eps=1e-6, attention_bias=False, layer_types=None, linear_conv_kernel_dim=4)
_KEYS: dict[str, Any] = {**_OPTIONS, TIED: False, **ROTARY_KEYS}


def in_layer(
    theirs: str, *ours: str, per: str | None = None, of: str | None = None, aliases: Sequence[str] = ()
) -> Rows:
    """The rule of a tensor of a layer, without what comes before in the names."""
    others = tuple(LAYER + alias for alias in aliases)
    return Rows(LAYER + theirs, tuple(OUR_LAYER + part for part in ours), per=per, of=of, aliases=others)


def _in_mixer(of: str, names: Mapping[str, str]) -> tuple[Rows, ...]:
    """The rules of tensors of one kind of mixer (theirs → ours)."""
    place = "self_attn" if of == _FULL else "linear_attn"
    return table(names, f"{LAYER}{place}.", f"{OUR_LAYER}mixer.", of)


_GATES = _in_mixer(_LINEAR, {"A_log": "decay.A_log", "dt_bias": "decay.dt_bias"})


def _model(config: Config, linear: dict[str, Any], full: dict[str, Any], post_norm: bool = False) -> dict[str, Any]:
    """Our `model` config, for their keys and further arguments of both mixers."""
    if (taps := config["linear_conv_kernel_dim"]) < 1:
        raise refusal("linear_conv_kernel_dim", taps, "1 or more")
    mixers = {
        "full_attention": llama.attention(config, rotary_map(config), **full),
        "linear_attention": component(
            _LINEAR,
            num_heads=config["linear_num_value_heads"],
            num_key_heads=config["linear_num_key_heads"],
            head_dim=config["linear_key_head_dim"],
            value_dim=config["linear_value_head_dim"],
            qk={"conv": taps, "activation": "silu", "norm": "l2"},
            v={"conv": taps, "activation": "silu"},
            **linear,
        ),
    }
    stack = pattern_of(_kinds_of(config), {kind: (KINDS[kind], mixer) for kind, mixer in mixers.items()})
    if post_norm:
        stack["init_args"]["post_norm"] = KINDS["full_attention"]
    sizes = {"num_heads": config["num_attention_heads"], "intermediate_size": config["intermediate_size"]}
    return model_of(config, config["rms_norm_eps"], stack, **sizes)


def _kinds_of(config: Config) -> list[str]:
    """The kind of each layer, by default full attention at every fourth."""
    types, count = config["layer_types"], config["num_hidden_layers"]
    if types is None:
        every = config.get("full_attention_interval", 4)
        types = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(count)]
    check_kinds(types, count)
    return types


def check_kinds(types: Any, count: int) -> None:
    """Refuse `layer_types` that are not a kind of each of `count` layers."""
    if len(types) != count or set(types) - set(KINDS):
        raise refusal("layer_types", types, f"{' and '.join(KINDS)}, one of them for each of the {count} layers")


def _keys_of(model: LanguageModel, partial: bool, without_tokens: bool = False) -> dict[str, Any]:
    """Their keys; with `partial` also what says how much of a head turns."""
    full = next((mixer for mixer in model.mixers if isinstance(mixer, SoftmaxAttention)), None)
    linear = next((mixer for mixer in model.mixers if isinstance(mixer, GatedDeltaNet)), None)
    types = ["full_attention" if isinstance(mixer, SoftmaxAttention) else "linear_attention" for mixer in model.mixers]
    keys = {
        **keys_of(model, "rms_norm_eps", without_tokens=without_tokens),
        "intermediate_size": mlp_size(model),
        "layer_types": types,
    }
    if linear:
        keys |= {
            "linear_num_value_heads": linear.num_heads,
            "linear_num_key_heads": linear.num_key_heads,
            "linear_key_head_dim": linear.key_size,
            "linear_value_head_dim": linear.value_size,
            "linear_conv_kernel_dim": linear.q_features.spec.conv,
        }
    if full:
        keys |= llama.attention_keys(full) | rotary_keys(full.q_features.map, partial)
    return keys


# Qwen3.5

_QWEN_KEYS: dict[str, Any] = (
    dict(num_attention_heads=16, head_dim=256, partial_rotary_factor=0.25, full_attention_interval=4)
    | dict(linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128)
    | {**_KEYS, "max_position_embeddings": 32768}
)
_GATED_QUERIES = tuple(
    in_layer(f"self_attn.q_proj.{part}", *(f"mixer.in_proj.{x}.{part}" for x in "qg"), per="num_heads", of=_FULL)
    for part in ("weight", "bias")
)
_QWEN_LAYER: tuple[Rows, ...] = (
    *table(llama.NORMS),
    *table(llama.MLP),
    *_GATED_QUERIES,
    *_in_mixer(_FULL, {theirs: ours for theirs, ours in llama.ATTENTION.items() if not theirs.startswith("q_proj.")}),
    *_GATES,
    *_in_mixer(
        _LINEAR,
        {
            "in_proj_qkv.weight": " ".join(f"in_proj.{x}.weight" for x in "qkv"),
            **{f"in_proj_{theirs}.weight": f"in_proj.{ours}.weight" for theirs, ours in ("zg", "aa", "bb")},
            "conv1d.weight": " ".join(f"{x}_features.weight" for x in "qkv"),
            **{"norm.weight": "o_norm.weight", "out_proj.weight": "o_proj.weight"},
        },
    ),
)


def _with_prefix(prefix: str, rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Rules that also know their tensors under `prefix` in place of `model.`, as in a model of more than text."""
    return tuple(
        dataclasses.replace(rule, aliases=(prefix + rule.theirs.removeprefix("model."),))
        if isinstance(rule, Rows) and rule.theirs.startswith("model.")
        else rule
        for rule in rules
    )


def _qwen(config: Config) -> dict[str, Any]:
    if rotary_map(config) is None:
        raise refusal("rope_theta", None, "a number")
    eps = config["rms_norm_eps"]
    norm = component("ZeroCentredRMSNorm", eps=eps)
    model = _model(
        config,
        linear={"output": component("GatedRMSNorm", eps=eps)},
        full={"qk_norm": norm, "gate": "channel"},
    )
    return {**model, "norm": "ZeroCentredRMSNorm"}


# OLMo-Hybrid


def _olmo(config: Config) -> dict[str, Any]:
    kinds, heads = _kinds_of(config), config["num_attention_heads"]
    if len(set(kinds)) < 2:  # transformers refuses it, too
        raise refusal("layer_types", kinds, "linear_attention and full_attention in one model")
    key_heads, value_heads = config["linear_num_key_heads"] or heads, config["linear_num_value_heads"] or heads
    key_size = config["linear_key_head_dim"] or int(0.75 * config["hidden_size"] / key_heads)
    sizes = {
        "num_key_value_heads": config["num_key_value_heads"] or heads,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": key_size,
        "linear_value_head_dim": config["linear_value_head_dim"] or 2 * key_size,
    }
    return _model(
        {**config, **sizes},
        linear={
            "output": component("GatedRMSNorm", eps=1e-5),  # whatever rms_norm_eps is
            "allow_neg_eigval": config["linear_allow_neg_eigval"],
        },
        full={"qk_norm": component("RMSNorm", eps=config["rms_norm_eps"]), "qk_norm_over": "width"},
        post_norm=True,
    )


def _olmo_keys(model: LanguageModel) -> dict[str, Any]:
    keys = _keys_of(model, partial=False, without_tokens=True)
    keys.pop("head_dim", None)  # which follows from the width
    betas = [mixer.beta.most for mixer in model.mixers if isinstance(mixer, GatedDeltaNet)]
    return {**keys, "linear_allow_neg_eigval": 2.0 in betas}


def _olmo_norm(theirs: str, ours: str, of: str, *aliases: str) -> Rows:
    """A norm of a layer, which some versions of transformers write under other names."""
    return in_layer(f"{theirs}.weight", f"{ours}.weight", of=of, aliases=[f"{alias}.weight" for alias in aliases])


# keys whose values follow from others where config.json leaves them out
_OLMO_DERIVED = words("""
num_key_value_heads linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim
""")
_OLMO_CONVOLUTION = "model.layers.{layer}.linear_attn."

FAMILIES = (
    Family(
        **_COMMON,
        name="hf_qwen3_5",
        model_types=("qwen3_5_text", "qwen3_5"),  # the second, also inside models that see images
        architecture="Qwen3_5ForCausalLM",
        keys=_QWEN_KEYS
        | dict(
            vocab_size=248320, hidden_size=4096, intermediate_size=12288, num_hidden_layers=32, num_key_value_heads=4
        ),
        fixed={**llama.FIXED, "attn_output_gate": (True,)},
        harmless=llama.HARMLESS | words("mamba_ssm_dtype mtp_num_hidden_layers mtp_use_dedicated_embeddings"),
        to_ours=_qwen,
        to_theirs=lambda model: _keys_of(model, partial=True),
        tensors=_with_prefix("model.language_model.", llama.TENSORS),
        layer_tensors=_with_prefix("model.language_model.", _QWEN_LAYER),
        ignored=(r"^mtp\.", r"^model\.visual\."),
        part="text_config",
    ),
    Family(
        **_COMMON,
        name="hf_olmo_hybrid",
        model_types=("olmo_hybrid",),
        architecture="OlmoHybridForCausalLM",
        keys={**_KEYS, **dict.fromkeys(sorted(_OLMO_DERIVED))}
        | dict(vocab_size=100352, hidden_size=3840, intermediate_size=11008, num_hidden_layers=32)
        | dict(num_attention_heads=30, linear_allow_neg_eigval=True, max_position_embeddings=65536),
        fixed=llama.FIXED,
        harmless=llama.HARMLESS
        | words("linear_a_log_max linear_a_log_min linear_dt_init_floor linear_dt_max linear_dt_min"),
        to_ours=_olmo,
        to_theirs=_olmo_keys,
        tensors=llama.TENSORS,
        layer_tensors=(
            # the norms of linear layers come before, those of attention layers after
            _olmo_norm("attention_layer_norm", "mixer_norm", _LINEAR, "input_layernorm"),
            _olmo_norm("feedforward_layer_norm", "mlp_norm", _LINEAR, "post_attention_layernorm"),
            _olmo_norm("post_attention_layernorm", "mixer_norm", _FULL, "feedforward_layer_norm"),
            _olmo_norm("post_feedforward_layernorm", "mlp_norm", _FULL),
            *table(llama.MLP),
            *_in_mixer(_FULL, llama.ATTENTION),
            *_in_mixer(
                _LINEAR,
                {
                    **{f"{x}_proj.weight": f"in_proj.{x}.weight" for x in "qkvgab"},
                    **{f"{x}_conv1d.weight": f"{x}_features.weight" for x in "qkv"},
                    "o_norm.weight": "o_norm.weight",
                    "o_proj.weight": "o_proj.weight",
                },
            ),
            *_GATES,
            # transformers holds one convolution, and saves its rows in three equal parts
            Recut(tuple(f"{_OLMO_CONVOLUTION}{x}_conv1d.weight" for x in "qkv"), f"{_OLMO_CONVOLUTION}conv1d.weight"),
        ),
    ),
)
