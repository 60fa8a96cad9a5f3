"""Qwen2 and Qwen2.5 of transformers: Llama with biases of queries, keys and values."""

from typing import Any

from zoo.conversion import llama
from zoo.conversion.family import Config, Family, refusal
from zoo.lm.model import LanguageModel


def to_ours(config: Config) -> dict[str, Any]:
    if others := set(config["layer_types"] or ()) - {"full_attention"}:
        raise refusal("layer_types", sorted(others), '"full_attention"')
    return llama.model_of(config, "SoftmaxAttention", {"bias": True})


def to_theirs(model: LanguageModel) -> dict[str, Any]:
    return llama.keys_of(model)


FAMILY = Family(
    name="hf_qwen2",
    target="huggingface",
    model_types=("qwen2",),
    architecture="Qwen2ForCausalLM",
    mixers=frozenset({"SoftmaxAttention"}),
    keys={
        **llama.KEYS,
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "layer_types": None,
    },
    fixed={**llama.FIXED, "use_sliding_window": (False,)},
    harmless=llama.HARMLESS | {"sliding_window", "max_window_layers"},  # without use_sliding_window
    ignored=llama.IGNORED,
    to_ours=to_ours,
    to_theirs=to_theirs,
    tensors=llama.TENSORS,
    layer_tensors=llama.LAYER,
)
