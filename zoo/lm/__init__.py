"""Language models built from token mixers: stacks, blocks, channel mixers, inputs, classifiers, states."""

# ruff: noqa: F401 (its names are imported from here)

from zoo.lm.block import Block, Multipliers, PostNormBlock
from zoo.lm.classifier import Classifier
from zoo.lm.inputs import Inputs, Patches
from zoo.lm.mlp import GLU, ChannelMixer, MLPLayer, SquaredReLU, SwiGLU
from zoo.lm.model import LanguageModel
from zoo.lm.rwkv7 import RWKV7ChannelMix
from zoo.lm.stack import H1, H2, Pattern, Stack, Uniform
from zoo.lm.states import join_states, load_state, save_state, take_states
