"""Nemotron-H: layers of Mamba2, of attention without positions, or of an MLP with squared ReLU."""

from typing import Any

from mixers import Mamba2, SoftmaxAttention
from zoo.lm import MLPLayer, SquaredReLU
from zoo.lm.model import LanguageModel
from zoo.saved.public.families.bamba import FULL, LINEAR, in_mixers, renamed_kinds
from zoo.saved.public.families.llama import attention, attention_keys
from zoo.saved.public.families.mamba import NO_LIMIT, Mamba2Keys
from zoo.saved.public.family import (
    TIED,
    Config,
    Family,
    component,
    experts,
    keys_of,
    model_of,
    pattern_of,
    refusal,
    words,
)
from zoo.saved.public.tensors import around_layers, table

_MLP = "MLPLayer"
_MAMBA2 = Mamba2Keys("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel", "use_conv_bias")
# kinds of layers → letters, in their patterns and in ours, and our mixers
_KINDS = {"linear_attention": ("M", LINEAR), "full_attention": ("*", FULL), "mlp": ("-", _MLP)}
_EXPERTS, _LAYER = "moe", "backbone.layers.{layer}."
_NAMES = {**{letter: kind for kind, (letter, _) in _KINDS.items()}, "E": _EXPERTS}
_DEFAULT = ["linear_attention", _EXPERTS, "full_attention", "mlp"]


def _to_ours(config: Config) -> dict[str, Any]:
    if config[TIED]:  # transformers would not tie them, but draw a head at random
        raise refusal(TIED, True, "false")
    kinds, eps = _kinds_of(config), config["layer_norm_epsilon"]
    mixers = {
        "linear_attention": _MAMBA2.mixer(config, eps, num_heads=config["mamba_num_heads"]),
        "full_attention": attention(config, rotary=None),
        "mlp": component(_MLP, mlp="SquaredReLU", intermediate_size=config["intermediate_size"]),
    }
    stack = pattern_of(kinds, {kind: (letter, mixers[kind]) for kind, (letter, _) in _KINDS.items()})
    return model_of({**config, "num_hidden_layers": len(kinds)}, eps, stack, mlp=None)


def _kinds_of(config: Config) -> list[str]:
    """The kind of each layer; a UserError names the first that is a mixture of experts."""
    key = next((key for key in ("layers_block_type", "layer_types") if config[key] is not None), None)
    if key is not None:
        kinds = renamed_kinds(config[key])
    else:
        key, pattern = "hybrid_override_pattern", config["hybrid_override_pattern"]
        kinds = _DEFAULT if pattern is None else [_NAMES.get(letter, letter) for letter in pattern]
    if not kinds or set(kinds) - {*_KINDS, _EXPERTS}:
        raise refusal(
            key, config[key], f"{', '.join(_KINDS)} (in a pattern {', '.join(k[0] for k in _KINDS.values())})"
        )
    if _EXPERTS in kinds:
        raise experts(kinds.index(_EXPERTS), key, config[key])
    if config["num_hidden_layers"] not in (None, len(kinds)):
        raise refusal("num_hidden_layers", config["num_hidden_layers"], f"{len(kinds)}, the number of kinds of layers")
    return kinds


def _to_theirs(model: LanguageModel) -> dict[str, Any]:
    linear = next((mixer for mixer in model.mixers if isinstance(mixer, Mamba2)), None)
    full = next((mixer for mixer in model.mixers if isinstance(mixer, SoftmaxAttention)), None)
    mlp = next((mixer.mlp for mixer in model.mixers if isinstance(mixer, MLPLayer)), None)
    names = {ours: (kind, letter) for kind, (letter, ours) in _KINDS.items()}
    kinds, letters = zip(*(names[type(mixer).__name__] for mixer in model.mixers), strict=True)
    return {
        **keys_of(model, "layer_norm_epsilon", without_tokens=True),
        "layers_block_type": list(kinds),
        "layer_types": list(kinds),
        "hybrid_override_pattern": "".join(letters),
        # transformers raises smaller steps to it in prefill; not 0, since it initialises by its logarithm
        "time_step_min": 1e-30,
        **({} if linear is None else _MAMBA2.keys(linear)),
        **attention_keys(full),
        **({"intermediate_size": mlp.down_proj.in_features} if isinstance(mlp, SquaredReLU) else {}),
    }


FAMILIES = (
    Family(
        name="hf_nemotron_h",
        target="huggingface",
        model_types=("nemotron_h",),
        architecture="NemotronHForCausalLM",
        mixers=frozenset({LINEAR, FULL, _MLP}),
        keys=dict(vocab_size=131072, hidden_size=4096, intermediate_size=21504, num_hidden_layers=None)
        | dict(layers_block_type=None, layer_types=None, hybrid_override_pattern=None, layer_norm_epsilon=1e-5)
        | dict(num_attention_heads=32, num_key_value_heads=8, head_dim=128)
        | dict(mamba_num_heads=128, mamba_head_dim=64, ssm_state_size=128, n_groups=8, conv_kernel=4)
        | {"use_conv_bias": True, TIED: False},
        fixed={
            "mlp_hidden_act": ("relu2",),
            "mamba_hidden_act": ("silu", "swish"),
            "time_step_limit": NO_LIMIT,
            **{key: (False,) for key in ("attention_bias", "mamba_proj_bias", "mlp_bias", "use_bias")},
        },
        # of a layer of Mamba2, `mamba_num_heads` and `mamba_head_dim` say the width, not `expand`
        harmless=words("""
            attention_dropout chunk_size expand hidden_dropout mamba_ssm_cache_dtype moe_intermediate_size
            moe_latent_size moe_shared_expert_intermediate_size moe_shared_expert_overlap mtp_hybrid_override_pattern
            mtp_layers_block_type n_group n_routed_experts n_shared_experts norm_topk_prob num_experts_per_tok
            num_logits_to_keep num_nextn_predict_layers output_router_logits partial_rotary_factor
            rescale_prenorm_residual residual_in_fp32 rope_theta routed_scaling_factor time_step_floor time_step_max
            time_step_min time_step_rank topk_group use_mamba_kernels
        """),
        same={"attention_head_dim": "head_dim", **dict.fromkeys(("norm_eps", "rms_norm_eps"), "layer_norm_epsilon")},
        ignored=(r"^mtp\.",),
        to_ours=_to_ours,
        to_theirs=_to_theirs,
        tensors=around_layers("backbone.embeddings.weight", "backbone.norm_f.weight"),
        layer_tensors=(
            *table({"norm.weight": "mixer_norm.weight"}, _LAYER),
            *table({f"mixer.{x}_proj.weight": f"mixer.mlp.{x}_proj.weight" for x in ("up", "down")}, _LAYER),
            *in_mixers(f"{_LAYER}mixer.", f"{_LAYER}mixer."),
        ),
    ),
)
