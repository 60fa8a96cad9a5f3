"""Qwen3-Next of transformers, without experts."""

from typing import Any

from zoo.conversion import llama, qwen
from zoo.conversion.family import Config, Family, refusal
from zoo.conversion.hybrid import LINEAR, in_layer
from zoo.lm.model import LanguageModel


def to_ours(config: Config) -> dict[str, Any]:
    dense, every = config["mlp_only_layers"] or [], config["decoder_sparse_step"]
    sparse = {layer for layer in range(config["num_hidden_layers"]) if (layer + 1) % every == 0} - set(dense)
    if config["num_experts"] != 0 and sparse:
        raise refusal("num_experts", config["num_experts"], "0, as they have no experts")
    return qwen.to_ours(config)


def to_theirs(model: LanguageModel) -> dict[str, Any]:
    return {**qwen.to_theirs(model), "num_experts": 0}


FAMILY = Family(
    name="hf_qwen3_next",
    target="huggingface",
    model_types=("qwen3_next",),
    architecture="Qwen3NextForCausalLM",
    mixers=frozenset({"GatedDeltaNet", "SoftmaxAttention"}),
    keys={
        **qwen.KEYS,
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "num_experts": None,  # means 512
        "mlp_only_layers": None,
        "decoder_sparse_step": 1,
    },
    fixed={**llama.FIXED, "use_sliding_window": (False,)},
    harmless=llama.HARMLESS
    | {
        "moe_intermediate_size",
        "norm_topk_prob",
        "num_experts_per_tok",
        "output_router_logits",
        "router_aux_loss_coef",
        "shared_expert_intermediate_size",
    },
    to_ours=to_ours,
    to_theirs=to_theirs,
    tensors=llama.TENSORS,
    layer_tensors=(
        *qwen.LAYER,
        in_layer(
            "linear_attn.in_proj_qkvz.weight",
            *(f"mixer.in_proj.{x}.weight" for x in "qkvg"),
            per="num_key_heads",
            of=LINEAR,
        ),
        in_layer(
            "linear_attn.in_proj_ba.weight",
            *(f"mixer.in_proj.{x}.weight" for x in "ba"),
            per="num_key_heads",
            of=LINEAR,
        ),
    ),
    ignored=(r"^mtp\.",),
)
