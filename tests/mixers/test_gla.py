import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kernels
import zoo
from mixers import GLA, Expanded, Features, Site
from mixers.base import Streams
from zoo.lm.stack import Uniform

CONV = Features(4, activation="silu")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factor", "num_layers", "parameters", "state"),
    [
        (1, 24, 400_142_336, 3_145_728),
        (2, 24, 413_339_648, 6_291_456),
        (4, 24, 427_151_360, 12_582_912),
        (8, 24, 454_774_784, 25_165_824),
        (1, 28, 455_909_888, 3_670_016),  # more layers instead of more state
    ],
)
@pytest.mark.parametrize("subheads", [True, False])
def test_parameters_as_published(factor: int, num_layers: int, parameters: int, state: int, subheads: bool):
    gla = partial(GLA, expand_k=1, qk=CONV, v=CONV)
    stack = Uniform(Expanded(mixer=gla, factor=factor, subheads=subheads))
    with torch.device("meta"):
        model = zoo.LanguageModel(
            stack, vocab_size=32000, hidden_size=1024, num_heads=8, num_layers=num_layers, intermediate_size=2816
        )
    assert model.num_parameters() == parameters
    assert model.state_size() == state


def test_sizes_default_to_the_papers():
    mixer = GLA(Site(64, 4))
    assert (mixer.key_size, mixer.value_size) == (8, 16)
    assert [tuple(p.shape) for p in mixer.decay_up.parameters()] == [(32, 16), (32,)]
    assert mixer.init_state(3).matrix.shape == (3, 4, 8, 16)
    mixer = GLA(Site(64, 4), num_heads=2, expand_k=1, expand_v=2, gate_rank=4)
    assert (mixer.key_size, mixer.value_size, mixer.in_proj.widths["decay"]) == (32, 64, 4)


def test_the_normalizer_makes_it_forget_slowly():
    raw = torch.linspace(-20, 20, 4 * 8 * 5).view(1, 5, 4, 8)
    for normalizer in (16.0, 1.0):
        mixer = GLA(Site(64, 4), gate_rank=32, gate_normalizer=normalizer)
        nn.init.eye_(mixer.decay_up.weight), nn.init.zeros_(mixer.decay_up.bias)
        s = mixer.gates(Streams(raw, raw, raw, raw.flatten(2)))
        torch.testing.assert_close(s.log_decay, F.logsigmoid(raw) / normalizer)


def test_gates_are_made_in_fp32_and_rounded_once():
    mixer = GLA(Site(64, 4)).bfloat16()
    raw = mixer.project(torch.randn(1, 5, 64).bfloat16()).log_decay
    with kernels.backend("reference"):
        rounded, exact = mixer.decay_up(raw), copy.deepcopy(mixer.decay_up).float()(raw.float())
    assert (rounded.dtype, exact.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(rounded, exact.bfloat16())
