"""Parts that only Qwen3-Next and Qwen3.5 share: their norms and their gated attention."""

from typing import Any

from zoo.conversion import hybrid, rotary
from zoo.conversion.family import Config, refusal
from zoo.conversion.hybrid import FULL, LINEAR, in_layer, in_mixer
from zoo.conversion.rules import Rows
from zoo.lm.model import LanguageModel

KEYS = {
    **hybrid.KEYS,
    "num_attention_heads": 16,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
}
LAYER: tuple[Rows, ...] = (
    in_layer("input_layernorm.weight", "mixer_norm.weight"),
    in_layer("post_attention_layernorm.weight", "mlp_norm.weight"),
    *hybrid.MLP,
    *(
        in_layer(
            f"self_attn.q_proj.{part}",
            f"mixer.in_proj.q.{part}",
            f"mixer.in_proj.g.{part}",
            per="num_heads",
            of=FULL,
        )
        for part in ("weight", "bias")
    ),
    *hybrid.ATTENTION,
    in_layer("linear_attn.conv1d.weight", *(f"mixer.{x}_features.weight" for x in "qkv"), of=LINEAR),
    *hybrid.GATES,
    *in_mixer(LINEAR, "linear_attn", {"norm.weight": "o_norm.weight", "out_proj.weight": "o_proj.weight"}),
)


def to_ours(config: Config) -> dict[str, Any]:
    if rotary.map_of(config) is None:
        raise refusal("rope_theta", None, "a number")
    eps = config["rms_norm_eps"]
    model = hybrid.model_of(
        config,
        linear={"output": {"class_path": "GatedRMSNorm", "init_args": {"eps": eps}}},
        full={
            "head_dim": config["head_dim"],
            "qk_norm": {"class_path": "ZeroCentredRMSNorm", "init_args": {"eps": eps}},
            "gate": "channel",
        },
    )
    return {**model, "norm": "ZeroCentredRMSNorm"}


def to_theirs(model: LanguageModel) -> dict[str, Any]:
    keys = hybrid.keys_of(model)
    if full := hybrid.attention_of(model):
        keys |= {"head_dim": full.head_dim, **rotary.keys_of(full.q_features.map, partial=True)}
    return keys
