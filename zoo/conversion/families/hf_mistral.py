"""Mistral of transformers: Llama, with or without a sliding window."""

from typing import Any

from zoo.conversion import llama
from zoo.conversion.family import Config, Family
from zoo.lm.model import LanguageModel


def to_ours(config: Config) -> dict[str, Any]:
    if config["sliding_window"] is None:
        return llama.model_of(config, "SoftmaxAttention", {})
    return llama.model_of(config, "SlidingWindowAttention", {"window_size": config["sliding_window"]})


def to_theirs(model: LanguageModel) -> dict[str, Any]:
    mixer: Any = model.mixers[0]
    return {**llama.keys_of(model), "sliding_window": mixer.window_size}


FAMILY = Family(
    name="hf_mistral",
    target="huggingface",
    model_types=("mistral",),
    architecture="MistralForCausalLM",
    mixers=frozenset({"SoftmaxAttention", "SlidingWindowAttention"}),
    keys={**llama.KEYS, "intermediate_size": 14336, "num_key_value_heads": 8, "sliding_window": 4096},
    fixed=llama.FIXED,
    harmless=llama.HARMLESS,
    ignored=llama.IGNORED,
    to_ours=to_ours,
    to_theirs=to_theirs,
    tensors=llama.TENSORS,
    layer_tensors=llama.LAYER,
)
