import math
from functools import partial

import pytest
import torch
from torch import Tensor

import kernels
import mixers
from mixers import MultiheadLatentAttention, Site

SITE = Site(hidden_size=32, num_heads=4)


def test_only_the_latent_and_the_shared_channels_are_kept():
    mixer = MultiheadLatentAttention(SITE, kv_rank=6, rope_dim=2)
    _, state = mixer(torch.randn(3, 7, 32), mixer.init_state(3))
    assert state.latent.shape == (3, 7, 8)
    assert (mixer.state_size(7), mixer.state_size()) == (7 * 8, math.inf)


def test_without_positions_the_order_of_earlier_tokens_has_no_effect():
    x = torch.randn(1, 9, 32)
    turned = torch.cat([x[:, :8].flip(1), x[:, 8:]], 1)
    for rotary, same in ((None, True), (mixers.Rotary, False)):
        mixer = MultiheadLatentAttention(SITE, rotary=rotary)
        y, z = (mixer(each)[0][:, -1] for each in (x, turned))
        assert torch.allclose(y, z, atol=1e-6) == same


def test_default_sizes():
    mixer = MultiheadLatentAttention(Site(hidden_size=4096, num_heads=32))
    sizes = mixer.head_dim, mixer.rope_dim, mixer.value_dim, mixer.kv_rank
    assert sizes == (128, 64, 128, 512)  # those of DeepSeek-V2


class Unfused(mixers.Rotary):
    """Computes what its base class does."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return super().forward(x, positions)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_queries_and_keys_turn_together_as_each_alone(backend: str, fraction: float):
    fused, unfused = (
        MultiheadLatentAttention(SITE, rotary=partial(rotary, fraction=fraction)) for rotary in (mixers.Rotary, Unfused)
    )
    streams = [torch.randn(2, 5, *shape, requires_grad=True) for shape in ((4, 12), (1, 4))]
    with kernels.backend(backend):
        turned = [mixer.rotary.turn_last(*streams, torch.arange(5)[None]) for mixer in (fused, unfused)]
    assert all(torch.equal(*both) for both in zip(*turned, strict=True))
    gradients = [torch.autograd.grad([y.square().sum() for y in each], streams) for each in turned]
    for actual, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("rope_dim", [0, 2])
@pytest.mark.parametrize("gate", [None, "head", "channel"])
def test_the_gate_and_the_shared_channels_are_the_formula(gate: str | None, rope_dim: int):
    torch.manual_seed(0)
    sizes = dict(head_dim=5, value_dim=6, kv_rank=7)
    mixer = MultiheadLatentAttention(SITE, **sizes, rope_dim=rope_dim, rotary=None, gate=gate)
    x, dy = torch.randn(2, 9, 32, requires_grad=True), torch.randn(2, 9, 32)

    widths = [4 * (5 + rope_dim), 7, rope_dim, {None: 0, "head": 4, "channel": 24}[gate]]
    q, latent, shared, g = (x @ mixer.in_proj.weight.T).split(widths, -1)
    latent = latent / (latent.square().mean(-1, keepdim=True) + 1e-6).sqrt() * mixer.latent_norm.weight
    k, v = (latent @ mixer.kv_up.weight.T).unflatten(-1, (4, 11)).split([5, 6], -1)
    k = torch.cat([k, shared[:, :, None].expand(-1, -1, 4, -1)], -1)
    scores = torch.einsum("bthd,bshd->bhts", q.unflatten(-1, (4, -1)), k) / (5 + rope_dim) ** 0.5
    scores = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -math.inf)
    o = torch.einsum("bhts,bshv->bthv", scores.softmax(-1), v)
    if gate is not None:
        o = o / (1 + (-g.unflatten(-1, (4, -1))).exp())
    expected = o.flatten(2) @ mixer.o_proj.weight.T

    y, leaves = mixer(x)[0], [x, *mixer.parameters()]
    torch.testing.assert_close(y, expected)
    for actual, wanted in zip(*(torch.autograd.grad(z, leaves, dy) for z in (y, expected)), strict=True):
        torch.testing.assert_close(actual, wanted)
