"""Mixers that carry more than a matrix from token to token: to the bit, and on a device."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

import kernels
from mixers import MLSTM, RWKV7, Expanded, LinearMixer, Site, TokenMixer
from mixers.two_layers import TwoLayers

from .test_parity import shaken
from .variants import CAUSAL, Factory


def carries(mixer: TokenMixer) -> bool:
    return isinstance(mixer, LinearMixer) and mixer.init_carried(1, "cpu", torch.float32) != ()


def rwkv7(site: Site) -> TwoLayers:
    """RWKV-7 above another, away from zeros."""
    build = partial(RWKV7, head_dim=16)
    return shaken(TwoLayers(site, lower=build, upper=build))


CARRYING: dict[str, Factory] = {name: factory for name, factory in CAUSAL.items() if carries(factory(Site(32, 4)))}
CARRYING |= {f"{name}, subheads": Expanded(mixer=factory, factor=2) for name, factory in CARRYING.items()}
CARRYING["RWKV7 above another"] = rwkv7
CARRYING["MLSTM with sigmoid gates"] = partial(MLSTM, input_bias=0.0, input_gate="sigmoid")


@torch.no_grad()
@pytest.mark.parametrize("factory", CARRYING.values(), ids=CARRYING)
def test_no_bit_comes_from_the_future_or_from_other_documents(factory: Callable):
    mixer, (x, other) = factory(Site(32, 4)), torch.randn(2, 1, 150, 32)
    y, cut = mixer(x)[0], 77
    assert torch.equal(mixer(torch.cat([x[:, :cut], other[:, cut:]], 1))[0][:, :cut], y[:, :cut])
    with kernels.deterministic():
        packed = mixer(x, cu_seqlens=torch.tensor([0, cut, 150]))[0]
        assert torch.equal(packed, torch.cat([mixer(x[:, :cut])[0], mixer(x[:, cut:])[0]], 1))


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("factory", CARRYING.values(), ids=CARRYING)
def test_a_layer_on_a_device(factory: Callable, packed: bool, dtype: torch.dtype, tolerance: float):
    mixer, (x, dy) = factory(Site(128, 2)).to(dtype).double(), torch.randn(2, 1, 333, 128).to(dtype).double()
    cu_seqlens = torch.tensor([0, 5, 5, 200, 333], dtype=torch.int32) if packed else None
    leaves = [x.requires_grad_(), *mixer.parameters()]
    expected = mixer(x, cu_seqlens=cu_seqlens)[0]
    gradients = torch.autograd.grad(expected, leaves, dy)
    mixer, x = mixer.cuda().to(dtype), x.detach().cuda().to(dtype).requires_grad_()
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.cuda()
    y, _ = mixer(x, cu_seqlens=cu_seqlens)
    actual = torch.autograd.grad(y, [x, *mixer.parameters()], dy.cuda().to(dtype))
    names = ("y", "x", *(name for name, _ in mixer.named_parameters()))
    usual = gradients[0].norm()
    for name, one, other in zip(names, (y, *actual), (expected, *gradients), strict=True):
        # the bias of an exponential input gate is normalised away, and its gradient nearly zero
        scale = other.norm() if other.norm() > 0.01 * usual else 0.1 * usual
        assert (one.cpu().double() - other).norm() < tolerance * scale * (1 if name == "y" else 5), name
    with torch.no_grad():
        state, steps = mixer.init_state(1), []
        for t in range(5):
            step, state = mixer(x[:, t : t + 1], state)
            steps.append(step)
    assert (torch.cat(steps, 1) - y[:, :5]).norm() < tolerance * y[:, :5].norm()
