"""The families of public checkpoints, one file each."""

from zoo.conversion.families import (
    fla_deltanet,
    fla_gated_deltanet,
    fla_gla,
    fla_hgrn2,
    fla_mamba2,
    fla_retnet,
    hf_llama,
    hf_mamba,
    hf_mamba2,
    hf_mistral,
    hf_olmo_hybrid,
    hf_qwen2,
    hf_qwen3_5,
    hf_qwen3_next,
)
from zoo.conversion.family import Family

# the first of a target that can hold a model is the one that it is converted to
FAMILIES: tuple[Family, ...] = (
    fla_gla.FAMILY,
    fla_gated_deltanet.FAMILY,
    fla_deltanet.FAMILY,
    fla_hgrn2.FAMILY,
    fla_retnet.FAMILY,
    fla_mamba2.FAMILY,
    hf_mamba.FAMILY,
    hf_mamba2.FAMILY,
    hf_llama.FAMILY,
    hf_mistral.FAMILY,
    hf_qwen2.FAMILY,
    hf_qwen3_5.FAMILY,
    hf_qwen3_next.FAMILY,
    hf_olmo_hybrid.FAMILY,
)

__all__ = ["FAMILIES"]
