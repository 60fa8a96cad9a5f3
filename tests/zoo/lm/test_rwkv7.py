"""RWKV-7's channel mix: its formula, its state under the contract of token mixers, and its first values."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import kernels
import mixers
from mixers import Site, TokenMixer
from mixers.contract import CLAUSES
from zoo.lm import ChannelMixer, RWKV7ChannelMix


class AsTokenMixer(TokenMixer):
    """A stateful channel mixer under the name of a token mixer, for the contract."""

    def __init__(self, site: Site, mlp: Callable[[int, int], ChannelMixer] = RWKV7ChannelMix):
        super().__init__()
        self.site, self.mlp = site, mlp(site.hidden_size, 96)
        self.mlp.site = site

    def forward(self, x: Tensor, state: Any = None, *, cu_seqlens=None, context_parallel=None):
        return self.mlp(x, state, cu_seqlens=cu_seqlens, context_parallel=context_parallel)

    def init_state(self, *args: Any) -> Any:
        return self.mlp.init_state(*args)

    def state_size(self, length: int | None = None) -> int | float:
        return self.mlp.state_size(length)

    def flops(self, length: int) -> int:
        return self.mlp.flops(length)


def test_it_keeps_the_contract_of_a_token_mixer():
    assert len(mixers.check_mixer(AsTokenMixer)) == len(CLAUSES)


def test_the_formula():
    mlp, x = RWKV7ChannelMix(8, 12).double(), torch.randn(2, 5, 8, dtype=torch.float64)
    with torch.no_grad():
        mlp.mix.uniform_()
        mlp.down_proj.weight.normal_()
    y = mlp(x)[0]
    for row in range(2):
        for t in range(5):
            before = x[row, t - 1] if t else torch.zeros(8, dtype=torch.float64)
            mixed = (1 - mlp.mix) * x[row, t] + mlp.mix * before
            inner = (mlp.up_proj.weight @ mixed).clamp(min=0) ** 2
            torch.testing.assert_close(y[row, t], mlp.down_proj.weight @ inner)


def test_the_first_values():
    mlp = RWKV7ChannelMix(16)
    mlp.site = Site(16, 2, layer=1, num_layers=4)
    mlp.reset_parameters()
    torch.testing.assert_close(mlp.mix, 1 - (torch.arange(16) / 16) ** 0.75**4)
    columns = mlp.up_proj.weight.T @ mlp.up_proj.weight
    torch.testing.assert_close(columns, torch.eye(16), atol=1e-5, rtol=0)  # a gain of 1, as the authors have it
    assert not mlp.down_proj.weight.any()
    assert mlp.state_size() == 0
    assert mlp.flops(10) == 2 * 10 * 2 * 16 * 64


@torch.no_grad()
def test_no_bit_comes_from_the_future_or_from_other_documents():
    mlp, (x, other) = RWKV7ChannelMix(32), torch.randn(2, 1, 90, 32)
    mlp.down_proj.weight.normal_()
    with kernels.deterministic():
        y = mlp(x)[0]
        assert torch.equal(mlp(torch.cat([x[:, :50], other[:, 50:]], 1))[0][:, :50], y[:, :50])
        packed = mlp(x, cu_seqlens=torch.tensor([0, 50, 90]))[0]
        assert torch.equal(packed, torch.cat([mlp(x[:, :50])[0], mlp(x[:, 50:])[0]], 1))
