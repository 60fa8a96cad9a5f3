"""OLMo-Hybrid of transformers."""

import dataclasses
from typing import Any

from mixers import GatedDeltaNet
from zoo.conversion import hybrid, llama, rotary
from zoo.conversion.family import Config, Family, refusal
from zoo.conversion.hybrid import FULL, LINEAR, in_layer, in_mixer
from zoo.conversion.rules import Recut, Rows
from zoo.lm.model import LanguageModel

_MIXER = "model.layers.{layer}.linear_attn."


def to_ours(config: Config) -> dict[str, Any]:
    kinds, heads = hybrid.kinds_of(config), config["num_attention_heads"]
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
    return hybrid.model_of(
        {**config, **sizes},
        linear={
            "output": {"class_path": "GatedRMSNorm", "init_args": {"eps": 1e-5}},  # whatever rms_norm_eps is
            "allow_neg_eigval": config["linear_allow_neg_eigval"],
        },
        full={
            "qk_norm": {"class_path": "RMSNorm", "init_args": {"eps": config["rms_norm_eps"]}},
            "qk_norm_over": "width",
        },
        post_norm=True,
    )


def to_theirs(model: LanguageModel) -> dict[str, Any]:
    keys = hybrid.keys_of(model)
    if full := hybrid.attention_of(model):
        keys |= rotary.keys_of(full.q_features.map)
    betas = [mixer.beta.most for mixer in model.mixers if isinstance(mixer, GatedDeltaNet)]
    # where these keys are missing, transformers takes default ids, which may be outside of our vocabulary
    tokens = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    return {**keys, **tokens, "linear_allow_neg_eigval": 2.0 in betas}


def _norm(theirs: str, ours: str, of: str, *also: str) -> Rows:
    """A norm of a layer, which some versions of transformers write under other names."""
    aliases = tuple(f"model.layers.{{layer}}.{name}.weight" for name in also)
    return dataclasses.replace(in_layer(f"{theirs}.weight", f"{ours}.weight", of=of), aliases=aliases)


FAMILY = Family(
    name="hf_olmo_hybrid",
    target="huggingface",
    model_types=("olmo_hybrid",),
    architecture="OlmoHybridForCausalLM",
    mixers=frozenset({"GatedDeltaNet", "SoftmaxAttention"}),
    keys={
        **hybrid.KEYS,
        "vocab_size": 100352,
        "hidden_size": 3840,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 30,
        "num_key_value_heads": None,
        "linear_num_key_heads": None,
        "linear_num_value_heads": None,
        "linear_key_head_dim": None,
        "linear_value_head_dim": None,
        "linear_allow_neg_eigval": True,
    },
    fixed=llama.FIXED,
    harmless=llama.HARMLESS
    | {"linear_a_log_max", "linear_a_log_min", "linear_dt_init_floor", "linear_dt_max", "linear_dt_min"},
    to_ours=to_ours,
    to_theirs=to_theirs,
    tensors=llama.TENSORS,
    layer_tensors=(
        # the norms of linear layers come before, those of attention layers after
        _norm("attention_layer_norm", "mixer_norm", LINEAR, "input_layernorm"),
        _norm("feedforward_layer_norm", "mlp_norm", LINEAR, "post_attention_layernorm"),
        _norm("post_attention_layernorm", "mixer_norm", FULL, "feedforward_layer_norm"),
        _norm("post_feedforward_layernorm", "mlp_norm", FULL),
        *hybrid.MLP,
        *in_mixer(FULL, "self_attn", {f"q_proj.{part}": f"in_proj.q.{part}" for part in ("weight", "bias")}),
        *hybrid.ATTENTION,
        *in_mixer(
            LINEAR,
            "linear_attn",
            {
                **{f"{x}_proj.weight": f"in_proj.{x}.weight" for x in "qkvgab"},
                **{f"{x}_conv1d.weight": f"{x}_features.weight" for x in "qkv"},
                "o_norm.weight": "o_norm.weight",
                "o_proj.weight": "o_proj.weight",
            },
        ),
        *hybrid.GATES,
        # transformers holds one convolution, and saves its rows in three equal parts
        Recut(tuple(f"{_MIXER}{x}_conv1d.weight" for x in "qkv"), f"{_MIXER}conv1d.weight"),
    ),
)
