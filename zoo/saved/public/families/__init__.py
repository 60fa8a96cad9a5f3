"""The families of public checkpoints, one file for each layout."""

from zoo.saved.public.families import bamba, fla, hybrids, kimi, llama, mamba, nemotron, rwkv7, state_spaces
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
# layouts that are not written
READ_ONLY: tuple[Family, ...] = state_spaces.FAMILIES
# types of models that people ask for → the reason why no family reads them
REFUSED = {
    "qwen3_next": "its published models are mixtures of experts, and ours are dense, which qwen3_5 can be",
    "falcon_mamba": "its layers normalise B, C and the time steps of Mamba, and ours do not",
    "ministral": "its layers alternate windows, which only Qwen2 and Qwen3 do here",
}

__all__ = ["FAMILIES", "READ_ONLY", "REFUSED"]
