"""Bamba and Granite 4: hybrids of Mamba2 and attention, each followed by an MLP."""

from collections.abc import Sequence
from typing import Any

from mixers import Mamba2, Rotary, SoftmaxAttention
from zoo.lm.model import LanguageModel
from zoo.saved.public.families import llama
from zoo.saved.public.families.hybrids import KINDS, check_kinds, in_layer
from zoo.saved.public.families.mamba import MAMBA2, NO_LIMIT, Mamba2Keys, expansion
from zoo.saved.public.families.rotary import ROTARY_KEYS, rotary_keys, rotary_map
from zoo.saved.public.family import (
    TIED,
    Config,
    Family,
    Spec,
    experts,
    keys_of,
    mlp_size,
    model_of,
    pattern_of,
    refusal,
    words,
)
from zoo.saved.public.tensors import LAYER, OUR_LAYER, Rows, around_layers, table

LINEAR, FULL = "Mamba2", "SoftmaxAttention"
_MAMBA2 = Mamba2Keys(
    "mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv", "mamba_conv_bias"
)
_KEYS: Config = (
    dict(num_hidden_layers=32, num_attention_heads=32, head_dim=None, attention_bias=False)
    | dict(mamba_n_heads=128, mamba_d_head="auto", mamba_n_groups=1, mamba_d_state=256, mamba_d_conv=4)
    | dict(mamba_expand=2, mamba_conv_bias=True)
    | {**ROTARY_KEYS, TIED: False}
)
_FIXED = {**llama.FIXED, "mamba_proj_bias": (False,), "time_step_limit": NO_LIMIT}
# names of kinds of layers before transformers 5.13
_OLDER = {"mamba": "linear_attention", "attention": "full_attention"}


def renamed_kinds(kinds: Sequence[Any]) -> list[Any]:
    """Kinds of layers, under the names of today."""
    return [_OLDER.get(kind, kind) for kind in kinds]


def _stack(config: Config, kinds: Sequence[str], rotary: Spec | None, **attention: Any) -> Spec:
    """Our stack for the kind of each layer; `attention` are further arguments of our attention."""
    width, heads = config["mamba_expand"] * config["hidden_size"], config["mamba_n_heads"]
    head = width // heads if config["mamba_d_head"] == "auto" else config["mamba_d_head"]
    if head * heads != width:
        raise refusal("mamba_n_heads", heads, f"mamba_expand · hidden_size / mamba_d_head, {width} / {head}")
    mixers = {
        "linear_attention": _MAMBA2.mixer(
            {**config, "mamba_d_head": head}, config["rms_norm_eps"], expand=config["mamba_expand"]
        ),
        "full_attention": llama.attention(config, rotary, **attention),
    }
    return pattern_of(kinds, {kind: (KINDS[kind], mixer) for kind, mixer in mixers.items()})


def _keys_of(model: LanguageModel) -> dict[str, Any]:
    """Their keys, except those of MLPs and positions, and of the order of layers."""
    linear = next((mixer for mixer in model.mixers if isinstance(mixer, Mamba2)), None)
    full = next((mixer for mixer in model.mixers if isinstance(mixer, SoftmaxAttention)), None)
    keys = {
        **keys_of(model, "rms_norm_eps", without_tokens=True),
        "mamba_n_heads": model.hidden_size,  # which transformers checks even if no layer is Mamba2
    }
    if linear:
        keys |= _MAMBA2.keys(linear) | {"mamba_expand": expansion(linear.num_heads * linear.value_size, model)}
    return keys | llama.attention_keys(full)


def in_mixers(linear: str, full: str) -> tuple[Rows, ...]:
    """The rules of tensors of Mamba2 and of attention, for the prefixes of their names."""
    ours = f"{OUR_LAYER}mixer."
    return *table(MAMBA2, linear, ours, LINEAR), *table(llama.ATTENTION, full, ours, FULL)


_IN_MIXERS = in_mixers(f"{LAYER}mamba.", f"{LAYER}self_attn.")

# Bamba


def _bamba(config: Config) -> dict[str, Any]:
    count, full = config["num_hidden_layers"], config["attn_layer_indices"] or []
    if not isinstance(full, list) or not all(type(layer) is int and 0 <= layer < count for layer in full):
        raise refusal("attn_layer_indices", full, f"a list of layers from 0 to {count - 1}")
    turning = rotary_map({**config, "partial_rotary_factor": 0.5})  # unless `rope_parameters` has another
    if turning is None:
        raise refusal("rope_theta", None, "a number")
    size = config["head_dim"] or config["hidden_size"] // config["num_attention_heads"]
    entries = size * turning["init_args"]["fraction"]
    if config["attn_rotary_emb"] not in (None, entries):
        raise refusal("attn_rotary_emb", config["attn_rotary_emb"], f"{entries:g}, as transformers turns")
    kinds = ["full_attention" if layer in full else "linear_attention" for layer in range(count)]
    sizes = {"num_heads": config["num_attention_heads"], "intermediate_size": config["intermediate_size"]}
    return model_of(config, config["rms_norm_eps"], _stack(config, kinds, turning), **sizes)


def _bamba_keys(model: LanguageModel) -> dict[str, Any]:
    full = {i: mixer for i, mixer in enumerate(model.mixers) if isinstance(mixer, SoftmaxAttention)}
    turning = rotary_keys(next(iter(full.values())).q_features.map, partial=True) if full else {}
    return {**_keys_of(model), "intermediate_size": mlp_size(model) or 1, "attn_layer_indices": list(full), **turning}


# Granite 4

# theirs → ours
_MULTIPLIERS = dict(embedding_multiplier="embedding", residual_multiplier="residual", logits_scaling="logits_scaling")
_SCALE = "attention_multiplier"


def _granite(config: Config) -> dict[str, Any]:
    if config["num_local_experts"] != 0:
        raise experts(0, "num_local_experts", config["num_local_experts"])
    for key in (*_MULTIPLIERS, _SCALE):
        if config[key] is None or config[key] <= 0:
            raise refusal(key, config[key], "numbers above 0")
    count = config["num_hidden_layers"]
    kinds = ["linear_attention"] * count if config["layer_types"] is None else renamed_kinds(config["layer_types"])
    check_kinds(kinds, count)
    positions = config["position_embedding_type"]
    if positions not in (None, "nope", "rope"):
        raise refusal("position_embedding_type", positions, 'null, "nope" or "rope"')
    turning = rotary_map(config, partial=False) if positions == "rope" else None
    if positions == "rope" and turning is None:
        raise refusal("rope_theta", None, "a number")
    return model_of(
        config,
        config["rms_norm_eps"],
        _stack(config, kinds, turning, scale=float(config[_SCALE])),
        num_heads=config["num_attention_heads"],
        intermediate_size=config["shared_intermediate_size"],
        multipliers={ours: float(config[theirs]) for theirs, ours in _MULTIPLIERS.items()},
    )


def _granite_keys(model: LanguageModel) -> dict[str, Any]:
    full = next((mixer for mixer in model.mixers if isinstance(mixer, SoftmaxAttention)), None)
    kinds = ["full_attention" if isinstance(mixer, SoftmaxAttention) else "linear_attention" for mixer in model.mixers]
    keys = {
        **_keys_of(model),
        "shared_intermediate_size": mlp_size(model) or 1,
        "num_local_experts": 0,
        "layer_types": kinds,
        **{theirs: getattr(model.multipliers, ours) for theirs, ours in _MULTIPLIERS.items()},
    }
    if full is None:
        return keys
    turning = full.q_features.map
    keys |= {_SCALE: full.scale}
    return keys | (rotary_keys(turning) | {"position_embedding_type": "rope"} if isinstance(turning, Rotary) else {})


FAMILIES = (
    Family(
        name="hf_bamba",
        target="huggingface",
        model_types=("bamba",),
        architecture="BambaForCausalLM",
        mixers=frozenset({LINEAR, FULL}),
        keys={**_KEYS, "max_position_embeddings": 262144, "attn_layer_indices": None, "attn_rotary_emb": None}
        | dict(vocab_size=128000, hidden_size=4096, intermediate_size=14336, num_key_value_heads=8, rms_norm_eps=1e-5),
        fixed={**_FIXED, "mlp_bias": (False,)},
        harmless=llama.HARMLESS
        | words("""
            mamba_chunk_size mamba_dt_rank num_logits_to_keep partial_rotary_factor use_mamba_kernels z_loss_coefficient
        """),
        to_ours=_bamba,
        to_theirs=_bamba_keys,
        tensors=around_layers("model.embed_tokens.weight", "model.final_layernorm.weight"),
        layer_tensors=(
            *table({"input_layernorm.weight": "mixer_norm.weight", "pre_ff_layernorm.weight": "mlp_norm.weight"}),
            *table({f"feed_forward{theirs[3:]}": ours for theirs, ours in llama.MLP.items()}),
            *_IN_MIXERS,
        ),
    ),
    Family(
        name="hf_granite_hybrid",
        target="huggingface",
        model_types=("granitemoehybrid",),
        architecture="GraniteMoeHybridForCausalLM",
        mixers=frozenset({LINEAR, FULL}),
        keys={**_KEYS, **dict.fromkeys((*_MULTIPLIERS, _SCALE), 1.0)}
        | dict(vocab_size=32000, hidden_size=4096, shared_intermediate_size=1024, rms_norm_eps=1e-6)
        | dict(num_key_value_heads=None, layer_types=None, position_embedding_type=None)
        | dict(num_local_experts=None),  # without it, there are 8
        fixed={**_FIXED, "normalization_function": ("rmsnorm",)},
        # `intermediate_size` is that of experts
        harmless=llama.HARMLESS
        | words("""
            init_method intermediate_size mamba_chunk_size num_experts_per_tok output_router_logits
            router_aux_loss_coef use_mamba_kernels
        """),
        to_ours=_granite,
        to_theirs=_granite_keys,
        tensors=llama.TENSORS,
        layer_tensors=(
            *table(llama.NORMS),
            in_layer("shared_mlp.input_linear.weight", "mlp.in_proj.gate.weight", "mlp.in_proj.up.weight"),
            in_layer("shared_mlp.output_linear.weight", "mlp.down_proj.weight"),
            *_IN_MIXERS,
        ),
    ),
)
