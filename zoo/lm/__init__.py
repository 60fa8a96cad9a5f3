"""Language models built from token mixers: stacks, blocks, channel mixers, states."""

from zoo.lm.mlp import GLU, ChannelMixer, SwiGLU
from zoo.lm.model import Block, LanguageModel
from zoo.lm.stack import H1, H2, Pattern, Stack, Uniform
from zoo.lm.states import join_states, load_state, save_state, take_states

__all__ = [
    "GLU",
    "H1",
    "H2",
    "Block",
    "ChannelMixer",
    "LanguageModel",
    "Pattern",
    "Stack",
    "SwiGLU",
    "Uniform",
    "join_states",
    "load_state",
    "save_state",
    "take_states",
]
