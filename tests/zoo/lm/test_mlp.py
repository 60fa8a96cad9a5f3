from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import zoo
from mixers import GatedDeltaNet, Site, UserError, check_mixer
from zoo.lm.mlp import ChannelMixer, MLPLayer, SquaredReLU, SwiGLU
from zoo.lm.rwkv7 import RWKV7ChannelMix
from zoo.lm.stack import Uniform


def test_swiglu_by_hand():
    mlp, x = SwiGLU(8, 5).double(), torch.randn(2, 3, 8, dtype=torch.float64)
    (gate, up), down = mlp.in_proj.weight.split(5), mlp.down_proj.weight
    gated = x @ gate.T
    expected = (gated * gated.sigmoid() * (x @ up.T)) @ down.T
    torch.testing.assert_close(mlp(x), expected)
    assert sum(p.numel() for p in mlp.parameters()) == 3 * 8 * 5  # no biases


def test_squared_relu_by_hand():
    mlp, x = SquaredReLU(8, 5).double(), torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    y, expected = mlp(x), (x @ mlp.up_proj.weight.T).clamp(min=0) ** 2 @ mlp.down_proj.weight.T
    torch.testing.assert_close(y, expected)
    actual, wanted = (torch.autograd.grad(z.sin().sum(), [x, *mlp.parameters()]) for z in (y, expected))
    torch.testing.assert_close(actual, wanted)
    assert SquaredReLU(8).down_proj.in_features == 32


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


def test_a_channel_mixer_as_a_token_mixer():
    check_mixer(partial(MLPLayer, mlp=SquaredReLU, intermediate_size=24))
    with pytest.raises(UserError, match="RWKV7ChannelMix is stateful, but MLPLayer needs one that is not"):
        MLPLayer(Site(16, 2), mlp=RWKV7ChannelMix)


LAYERS = """
{class_path: Pattern, init_args: {pattern: -G-, mixers: {G: GatedDeltaNet, -: {class_path: MLPLayer, init_args: {mlp:
SquaredReLU, intermediate_size: 24}}}}}
"""


@torch.no_grad()
def test_layers_that_are_only_an_mlp_or_only_a_mixer():
    sizes = ("model.vocab_size=31", "model.hidden_size=16", "model.num_heads=2", "model.num_layers=3")
    model = zoo.build("gated_deltanet.yaml", *sizes, f"model.stack={LAYERS}", "model.mlp=null", "model.norm_eps=1e-3")
    x = tokens = torch.randint(31, (2, 9))
    x = model.embeddings(tokens)
    for block in model.layers:
        h = block.mixer_norm(x)
        x = x + (block.mixer.mlp(h) if isinstance(block.mixer, MLPLayer) else block.mixer(h)[0])
    expected = model.norm(x) @ model.lm_head.weight.T
    torch.testing.assert_close(model(tokens)[0], expected)
    x = model.embeddings(tokens)
    for block in model.layers:
        if isinstance(block.mixer, MLPLayer):
            x = x + block.mixer.mlp(block.mixer_norm(x))
    with model.without_mixers():  # an MLP mixes no tokens
        torch.testing.assert_close(model(tokens)[0], model.norm(x) @ model.lm_head.weight.T)
    state, outputs = model.init_state(2), []
    for t in range(9):
        logits, state = model(tokens[:, t : t + 1], state)
        outputs.append(logits)
    torch.testing.assert_close(torch.cat(outputs, 1), expected, rtol=1e-4, atol=1e-6)
    assert len(state) == 3
    assert model.state_size() == model.mixers[1].state_size()
    assert model.flops(10) == sum(mixer.flops(10) for mixer in model.mixers) + 2 * 10 * 31 * 16
