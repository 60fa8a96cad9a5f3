"""Kimi Linear: hybrids of KDA and multi-head latent attention without positions, with dense MLPs."""

from collections.abc import Mapping
from typing import Any

from mixers import KDA, MultiheadLatentAttention
from zoo.lm.model import LanguageModel
from zoo.saved.public.families import llama
from zoo.saved.public.families.hybrids import KINDS, check_kinds, in_layer
from zoo.saved.public.family import (
    TIED,
    Config,
    Family,
    check_kind,
    component,
    experts,
    keys_of,
    mlp_size,
    model_of,
    pattern_of,
    refusal,
    unknown_in,
    words,
)
from zoo.saved.public.tensors import LAYER, OUR_LAYER, Rows, table

_LINEAR, _FULL = "KDA", "MultiheadLatentAttention"
_KEYS: Config = (
    dict(vocab_size=163840, hidden_size=2304, intermediate_size=9216, num_hidden_layers=27, rms_norm_eps=1e-5)
    | dict(num_attention_heads=32, num_key_value_heads=None, kv_lora_rank=512, v_head_dim=128)
    | dict(qk_nope_head_dim=128, qk_rope_head_dim=64, layer_types=None, linear_attn_config=None)
    | dict(linear_num_heads=32, linear_head_dim=128, linear_conv_kernel_dim=4)
    | dict(mlp_layer_types=None, num_experts=256, first_k_dense_replace=1, moe_layer_freq=1)
    | {TIED: False}
)
# the published config's names for what transformers calls otherwise
_LINEAR_CONFIG = {
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
_LAYERS = {"kda_layers": "linear_attention", "full_attn_layers": "full_attention"}  # counted from one
_LATENT_EPS = 1e-6  # of the norm of latents, whatever rms_norm_eps is


def _to_ours(config: Config) -> dict[str, Any]:
    _check_dense(config)
    if config[TIED]:  # transformers would not tie them, but draw a head at random
        raise refusal(TIED, True, "false")
    if config["num_key_value_heads"] not in (None, config["num_attention_heads"]):
        raise refusal("num_key_value_heads", config["num_key_value_heads"], "null or num_attention_heads")
    config = _with_linear_config(config)
    features = {"conv": config["linear_conv_kernel_dim"], "activation": "silu"}
    mixers = {
        "linear_attention": component(
            _LINEAR,
            num_heads=config["linear_num_heads"],
            head_dim=config["linear_head_dim"],
            qk={**features, "norm": "l2"},
            v=features,
            output=component("mixers.SigmoidGatedRMSNorm", eps=config["rms_norm_eps"]),
            gate_bias=False,
        ),
        "full_attention": component(
            _FULL,
            num_heads=config["num_attention_heads"],
            head_dim=config["qk_nope_head_dim"],
            rope_dim=config["qk_rope_head_dim"],
            value_dim=config["v_head_dim"],
            kv_rank=config["kv_lora_rank"],
            rotary=None,
            norm=component("mixers.RMSNorm", eps=_LATENT_EPS),
        ),
    }
    stack = pattern_of(config["layer_types"], {kind: (KINDS[kind], mixer) for kind, mixer in mixers.items()})
    return model_of(config, config["rms_norm_eps"], stack, intermediate_size=config["intermediate_size"])


def _check_dense(config: Config) -> None:
    """Refuse mixtures of experts, naming the first layer that has one."""
    kinds, count = config["mlp_layer_types"], config["num_hidden_layers"]
    if kinds is not None:
        if len(kinds) != count or set(kinds) - {"dense", "sparse"}:
            raise refusal("mlp_layer_types", kinds, f"dense, for each of the {count} layers")
        if "sparse" in kinds:
            raise experts(kinds.index("sparse"), "mlp_layer_types", kinds)
        return
    first, every = config["first_k_dense_replace"], config["moe_layer_freq"]
    if config["num_experts"] and (layer := -(first // -every) * every) < count:
        raise experts(layer, "first_k_dense_replace", first)


def _with_linear_config(config: Config) -> dict[str, Any]:
    """The config with the kinds of layers, and sizes, that `linear_attn_config` has."""
    nested, count, types = config["linear_attn_config"] or {}, config["num_hidden_layers"], config["layer_types"]
    if not isinstance(nested, Mapping) or unknown_in(nested, _LINEAR_CONFIG.keys() | _LAYERS.keys()):
        raise refusal("linear_attn_config", nested, f"{', '.join([*_LINEAR_CONFIG, *_LAYERS])}")
    for key, name in _LINEAR_CONFIG.items():
        check_kind(f"linear_attn_config.{key}", nested.get(key), _KEYS[name])
    if types is None and nested.keys() >= _LAYERS.keys():
        numbered = {number: kind for key, kind in _LAYERS.items() for number in nested[key]}
        types = [numbered.get(layer) for layer in range(1, count + 1)]
    elif types is None:
        types = ["linear_attention" if not layer or layer % 4 else "full_attention" for layer in range(count)]
    check_kinds(types, count)
    sizes = {name: nested[key] for key, name in _LINEAR_CONFIG.items() if key in nested}
    return {**config, **sizes, "layer_types": types}


def _to_theirs(model: LanguageModel) -> dict[str, Any]:
    linear = next((mixer for mixer in model.mixers if isinstance(mixer, KDA)), None)
    full = next((mixer for mixer in model.mixers if isinstance(mixer, MultiheadLatentAttention)), None)
    types = ["linear_attention" if isinstance(mixer, KDA) else "full_attention" for mixer in model.mixers]
    keys = {
        **keys_of(model, "rms_norm_eps", without_tokens=True),
        "intermediate_size": mlp_size(model) or 1,
        "layer_types": types,
        "mlp_layer_types": ["dense"] * model.num_layers,
        "first_k_dense_replace": model.num_layers,
    }
    if linear:
        of_linear = (linear.num_heads, linear.key_size, linear.q_features.spec.conv)
        keys |= dict(zip(_LINEAR_CONFIG.values(), of_linear, strict=True))
    if full:
        keys |= {
            "num_attention_heads": full.num_heads,
            "num_key_value_heads": full.num_heads,
            "kv_lora_rank": full.kv_rank,
            "qk_nope_head_dim": full.head_dim,
            "qk_rope_head_dim": full.rope_dim,
            "v_head_dim": full.value_dim,
        }
    layers = {key: [i for i, of in enumerate(types, 1) if of == kind] for key, kind in _LAYERS.items()}
    sizes = {key: keys.get(name, _KEYS[name]) for key, name in _LINEAR_CONFIG.items()}
    return {**keys, "linear_attn_config": {**layers, **sizes}}


_OF_KDA = {f"{x}_proj": f"in_proj.{x}" for x in "qkvb"} | {f"{x}_conv1d": f"{x}_features" for x in "qkv"}
_OF_KDA |= {"f_a_proj": "in_proj.f", "f_b_proj": "decay_up", "g_a_proj": "in_proj.g", "g_b_proj": "g_up"}
_OF_KDA |= {"o_norm": "o_norm.norm", "o_proj": "o_proj"}
_OF_ATTENTION = {
    "q_proj.weight": "in_proj.q.weight",
    "kv_a_proj_with_mqa.weight": "in_proj.latent.weight in_proj.shared.weight",
    "kv_a_layernorm.weight": "latent_norm.weight",
    "kv_b_proj.weight": "kv_up.weight",
    "o_proj.weight": "o_proj.weight",
}
_MIXER, _OURS = f"{LAYER}self_attn.", f"{OUR_LAYER}mixer."
_LAYER = (
    *table(llama.NORMS),
    # transformers 5.23.0 also saves dense MLPs under the name of experts
    *(in_layer(theirs, ours, aliases=[f"block_sparse_moe{theirs[3:]}"]) for theirs, ours in llama.MLP.items()),
    *table({f"{theirs}.weight": f"{ours}.weight" for theirs, ours in _OF_KDA.items()}, _MIXER, _OURS, _LINEAR),
    Rows(f"{_MIXER}A_log", (f"{_OURS}decay.A_log",), of=_LINEAR, shape=(1, 1, -1, 1)),
    Rows(f"{_MIXER}dt_bias", (f"{_OURS}decay.dt_bias",), of=_LINEAR),
    *table(_OF_ATTENTION, _MIXER, _OURS, _FULL),
)

FAMILIES = (
    Family(
        name="hf_kimi_linear",
        target="huggingface",
        model_types=("kimi_linear",),
        architecture="KimiLinearForCausalLM",
        mixers=frozenset({_LINEAR, _FULL}),
        keys=_KEYS,
        fixed={
            "hidden_act": ("silu",),
            "attention_bias": (False,),
            "q_lora_rank": (None,),
            "mla_use_nope": (True,),
            "num_nextn_predict_layers": (0,),
        },
        # without experts and positions
        harmless=llama.HARMLESS
        | words("""
            head_dim model_max_length moe_intermediate_size moe_renormalize moe_router_activation_func n_group
            n_shared_experts norm_topk_prob num_expert_group num_experts_per_tok num_experts_per_token
            num_shared_experts output_router_logits qk_head_dim rope_parameters rope_scaling rope_theta
            routed_scaling_factor topk_group use_grouped_topk
        """),
        to_ours=_to_ours,
        to_theirs=_to_theirs,
        tensors=llama.TENSORS,
        layer_tensors=_LAYER,
    ),
)
