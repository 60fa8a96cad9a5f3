"""Llama of transformers."""

from typing import Any

from zoo.conversion import llama
from zoo.conversion.family import Config, Family
from zoo.lm.model import LanguageModel


def to_ours(config: Config) -> dict[str, Any]:
    biases = {"bias": config["attention_bias"], "output_bias": config["attention_bias"]}
    return llama.model_of(config, "SoftmaxAttention", biases)


def to_theirs(model: LanguageModel) -> dict[str, Any]:
    mixer: Any = model.mixers[0]
    return {**llama.keys_of(model), "attention_bias": mixer.o_proj.bias is not None}


FAMILY = Family(
    name="hf_llama",
    target="huggingface",
    model_types=("llama",),
    architecture="LlamaForCausalLM",
    mixers=frozenset({"SoftmaxAttention"}),
    keys={**llama.KEYS, "attention_bias": False},
    fixed={**llama.FIXED, "mlp_bias": (False,)},
    harmless=llama.HARMLESS,
    ignored=llama.IGNORED,
    to_ours=to_ours,
    to_theirs=to_theirs,
    tensors=llama.TENSORS,
    layer_tensors=llama.LAYER,
)
