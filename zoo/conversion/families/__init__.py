"""The families of public checkpoints, one file each."""

from zoo.conversion.families import fla_gla, hf_olmo_hybrid, hf_qwen3_5, hf_qwen3_next
from zoo.conversion.family import Family

FAMILIES: tuple[Family, ...] = (
    fla_gla.FAMILY,
    hf_qwen3_5.FAMILY,
    hf_qwen3_next.FAMILY,
    hf_olmo_hybrid.FAMILY,
)

__all__ = ["FAMILIES"]
