"""The language models of Qwen3.5 in transformers, without experts; also those inside models that see images."""

from zoo.conversion import llama, qwen
from zoo.conversion.family import Family
from zoo.conversion.hybrid import LINEAR, in_layer, in_mixer, with_prefix

FAMILY = Family(
    name="hf_qwen3_5",
    target="huggingface",
    model_types=("qwen3_5_text", "qwen3_5"),
    architecture="Qwen3_5ForCausalLM",
    mixers=frozenset({"GatedDeltaNet", "SoftmaxAttention"}),
    keys={
        **qwen.KEYS,
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
    },
    fixed={**llama.FIXED, "attn_output_gate": (True,)},
    harmless=llama.HARMLESS | {"mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"},
    to_ours=qwen.to_ours,
    to_theirs=qwen.to_theirs,
    tensors=with_prefix("model.language_model.", llama.TENSORS),
    layer_tensors=with_prefix(
        "model.language_model.",
        (
            *qwen.LAYER,
            in_layer("linear_attn.in_proj_qkv.weight", *(f"mixer.in_proj.{x}.weight" for x in "qkv"), of=LINEAR),
            *in_mixer(
                LINEAR,
                "linear_attn",
                {f"in_proj_{theirs}.weight": f"in_proj.{ours}.weight" for theirs, ours in ("zg", "aa", "bb")},
            ),
        ),
    ),
    ignored=(r"^mtp\.", r"^model\.visual\."),
    part="text_config",
)
