"""Bamba: hybrids of Mamba2 and attention, each followed by an MLP."""

from typing import Any

from mixers import Mamba2, SoftmaxAttention
from zoo.lm.model import LanguageModel
from zoo.saved.public.families import llama
from zoo.saved.public.families.hybrids import KINDS, biased, in_layer
from zoo.saved.public.families.mamba import MAMBA2, NO_LIMIT, expansion
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
from zoo.saved.public.tensors import around_layers

_LINEAR, _FULL = "Mamba2", "SoftmaxAttention"
_KEYS: Config = (
    dict(vocab_size=128000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, rms_norm_eps=1e-5)
    | dict(num_attention_heads=32, num_key_value_heads=8, head_dim=None, attention_bias=False, attn_layer_indices=None)
    | dict(mamba_n_heads=128, mamba_d_head="auto", mamba_n_groups=1, mamba_d_state=256, mamba_d_conv=4)
    | dict(mamba_expand=2, mamba_conv_bias=True, attn_rotary_emb=None)
    | {**ROTARY_KEYS, "max_position_embeddings": 262144, TIED: False}
)


def _to_ours(config: Config) -> dict[str, Any]:
    size, count, full = config["hidden_size"], config["num_hidden_layers"], config["attn_layer_indices"] or []
    width, heads = config["mamba_expand"] * size, config["mamba_n_heads"]
    head = width // heads if config["mamba_d_head"] == "auto" else config["mamba_d_head"]
    if head * heads != width:
        raise refusal("mamba_n_heads", heads, f"mamba_expand · hidden_size / mamba_d_head, {width} / {head}")
    if not isinstance(full, list) or not all(type(layer) is int and 0 <= layer < count for layer in full):
        raise refusal("attn_layer_indices", full, f"a list of layers from 0 to {count - 1}")
    bias, eps = config["attention_bias"], config["rms_norm_eps"]
    turning = rotary_map({**config, "partial_rotary_factor": 0.5})  # unless `rope_parameters` has another
    if turning is None:
        raise refusal("rope_theta", None, "a number")
    entries = (config["head_dim"] or size // config["num_attention_heads"]) * turning["init_args"]["fraction"]
    if config["attn_rotary_emb"] not in (None, entries):
        raise refusal("attn_rotary_emb", config["attn_rotary_emb"], f"{entries:g}, as transformers turns")
    mixers = {
        "linear_attention": component(
            _LINEAR,
            expand=config["mamba_expand"],
            head_dim=head,
            state_dim=config["mamba_d_state"],
            num_groups=config["mamba_n_groups"],
            xbc={"conv": config["mamba_d_conv"], "bias": config["mamba_conv_bias"], "activation": "silu"},
            norm_eps=eps,
        ),
        "full_attention": component(
            _FULL,
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            qk={"map": turning},
            bias=bias,
            output_bias=bias,
        ),
    }
    kinds = ["full_attention" if layer in full else "linear_attention" for layer in range(count)]
    stack = pattern_of(kinds, {kind: (KINDS[kind], mixer) for kind, mixer in mixers.items()})
    sizes = {"num_heads": config["num_attention_heads"], "intermediate_size": config["intermediate_size"]}
    return model_of(config, eps, stack, **sizes)


def _to_theirs(model: LanguageModel) -> dict[str, Any]:
    linear = next((mixer for mixer in model.mixers if isinstance(mixer, Mamba2)), None)
    full = next((mixer for mixer in model.mixers if isinstance(mixer, SoftmaxAttention)), None)
    keys = {
        **keys_of(model, "rms_norm_eps"),
        "intermediate_size": mlp_size(model) or 1,
        "attn_layer_indices": [i for i, mixer in enumerate(model.mixers) if isinstance(mixer, SoftmaxAttention)],
        "mamba_n_heads": model.hidden_size,  # which transformers checks even if no layer is Mamba2
        # where these keys are missing, transformers takes ids that may be outside of our vocabulary
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    }
    if linear:
        keys |= {
            "mamba_n_heads": linear.num_heads,
            "mamba_d_head": linear.value_size,
            "mamba_n_groups": linear.num_key_heads,
            "mamba_d_state": linear.key_size,
            "mamba_d_conv": linear.v_features.spec.conv,
            "mamba_conv_bias": linear.v_features.spec.bias,
            "mamba_expand": expansion(linear.num_heads * linear.value_size, model),
        }
    if full:
        keys |= {
            "num_attention_heads": full.num_heads,
            "num_key_value_heads": full.num_kv_heads,
            "head_dim": full.head_dim,
            "attention_bias": full.o_proj.bias is not None,
            **rotary_keys(full.q_features.map, partial=True),
        }
    return keys


_ATTENTION = {name: part for x in "qkv" for name, part in biased(f"{x}_proj", f"in_proj.{x}").items()}

FAMILIES = (
    Family(
        name="hf_bamba",
        target="huggingface",
        model_types=("bamba",),
        architecture="BambaForCausalLM",
        mixers=frozenset({_LINEAR, _FULL}),
        keys=_KEYS,
        fixed={
            **llama.FIXED,
            **{"mlp_bias": (False,), "mamba_proj_bias": (False,), "time_step_limit": NO_LIMIT},
        },
        harmless=llama.HARMLESS
        | words("""
            mamba_chunk_size num_logits_to_keep partial_rotary_factor use_mamba_kernels z_loss_coefficient
        """),
        to_ours=_to_ours,
        to_theirs=_to_theirs,
        tensors=around_layers("model.embed_tokens.weight", "model.final_layernorm.weight"),
        layer_tensors=(
            in_layer("input_layernorm.weight", "mixer_norm.weight"),
            in_layer("pre_ff_layernorm.weight", "mlp_norm.weight"),
            *(in_layer(f"feed_forward{theirs[3:]}", ours) for theirs, ours in llama.MLP.items()),
            *(
                in_layer(f"self_attn.{theirs}", f"mixer.{ours}", of=_FULL)
                for theirs, ours in {**_ATTENTION, **biased("o_proj", "o_proj")}.items()
            ),
            *(
                in_layer(f"mamba.{theirs}", *(f"mixer.{part}" for part in ours.split()), of=_LINEAR)
                for theirs, ours in MAMBA2.items()
            ),
        ),
    ),
)
