import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import zoo
from mixers import GatedDeltaNet
from zoo.lm.mlp import ChannelMixer, SwiGLU
from zoo.lm.stack import Uniform


def test_swiglu_by_hand():
    mlp, x = SwiGLU(8, 5).double(), torch.randn(2, 3, 8, dtype=torch.float64)
    (gate, up), down = mlp.in_proj.weight.split(5), mlp.down_proj.weight
    gated = x @ gate.T
    expected = (gated * gated.sigmoid() * (x @ up.T)) @ down.T
    torch.testing.assert_close(mlp(x), expected)
    assert sum(p.numel() for p in mlp.parameters()) == 3 * 8 * 5  # no biases


@pytest.mark.parametrize(("hidden", "inner"), [(96, 256), (97, 512), (1024, 2816), (2048, 5632)])
def test_default_inner_size(hidden: int, inner: int):
    with torch.device("meta"):
        assert SwiGLU(hidden).down_proj.in_features == inner


def test_flops_are_what_is_executed():
    mlp = SwiGLU(16, 24)
    with FlopCounterMode(display=False) as counter:
        mlp(torch.zeros(1, 10, 16))
    assert mlp.flops(10) == counter.get_total_flops()


class Bottleneck(ChannelMixer):
    """A channel mixer by someone else."""

    def __init__(self, hidden_size: int, intermediate_size: int | None = None):
        super().__init__()
        self.down, self.up = nn.Linear(hidden_size, intermediate_size), nn.Linear(intermediate_size, hidden_size)

    def forward(self, x):
        return self.up(self.down(x))


def test_a_channel_mixer_of_ones_own():
    model = zoo.LanguageModel(Uniform(GatedDeltaNet), 7, 16, 2, num_layers=2, intermediate_size=4, mlp=Bottleneck)
    assert [block.mlp.down.out_features for block in model.layers] == [4, 4]
    without = zoo.LanguageModel(Uniform(GatedDeltaNet), 7, 16, 2, num_layers=2, mlp=None)
    assert model.flops(10) - without.flops(10) == 2 * (2 * 2 * 10 * 16 * 4)  # counted from its matrices, not its biases
    tokens = torch.tensor([[1, 2, 3]])
    model(tokens)[0].sum().backward()
    assert all(p.grad is not None for block in model.layers for p in block.mlp.parameters())


def test_without_mlp_there_is_no_norm_for_it():
    model = zoo.LanguageModel(Uniform(GatedDeltaNet), 7, 16, 2, num_layers=1, mlp=None)
    assert not [name for name in model.state_dict() if "mlp" in name]
