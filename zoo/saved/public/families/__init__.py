"""The families of public checkpoints, one file for each layout."""

from zoo.saved.public.families import bamba, fla, hybrids, kimi, llama, mamba, nemotron, rwkv7
from zoo.saved.public.family import Family

# the first of a target that can hold a model is the one that it is converted to
FAMILIES: tuple[Family, ...] = (
    *fla.FAMILIES,
    *rwkv7.FAMILIES,
    *mamba.FAMILIES,
    *llama.FAMILIES,
    *hybrids.FAMILIES,
    *kimi.FAMILIES,
    *bamba.FAMILIES,
    *nemotron.FAMILIES,
)

__all__ = ["FAMILIES"]
