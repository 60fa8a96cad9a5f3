"""Gated slot attention: its formula in fp64, subheads included, sizes, and arguments that do not fit."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mixers import Expanded, GatedSlotAttention, Site

from .test_parity import by_name

SITE = Site(hidden_size=32, num_heads=2)


def formula(x: Tensor, w: dict[str, Tensor], mixer: GatedSlotAttention) -> Tensor:
    """The layer as it is published, token by token. Each subhead has slots of its own."""
    H, E, M = mixer.num_heads, mixer.subheads, mixer.num_slots
    q, k, v, f = (x @ w[f"in_proj.{name}.weight"].T for name in "qkvf")
    if E > 1:
        q, k = (
            torch.einsum("bthk,hke->bthe", F.silu(s.unflatten(2, (H, -1))), w[f"{name}_expand.weight"]).flatten(2)
            for name, s in (("q", q), ("k", k))
        )
    q, k = (F.silu(s).unflatten(2, (H, E, -1)) for s in (q, k))
    v, forget = F.silu(v).unflatten(2, (H, -1)), f.sigmoid().pow(1 / 8).unflatten(2, (H, E, M))
    keys, values, outputs = x.new_zeros(len(x), H, E, M, q.shape[-1]), x.new_zeros(len(x), H, E, M, v.shape[-1]), []
    for t in range(x.shape[1]):
        a = forget[:, t, ..., None]
        keys = a * keys + (1 - a) * k[:, t, :, :, None]
        values = a * values + (1 - a) * v[:, t, :, None, None]
        scores = (keys * q[:, t, :, :, None]).sum(-1)  # [B,H,E,M]
        outputs.append((scores.softmax(-1)[..., None] * values).sum((2, 3)))
    o = F.silu(torch.stack(outputs, 1)).flatten(2)
    o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w["g_norm.weight"]
    return o @ w["o_proj.weight"].T


@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("length", [1, 70])
def test_the_formula(length: int, factor: int):
    mixer = Expanded(mixer=partial(GatedSlotAttention, num_slots=5, expand_k=0.5), factor=factor)(SITE).double()
    with torch.no_grad():
        mixer.in_proj.weight.mul_(4)
    x, dy = torch.randn(2, 2, length, 32, dtype=torch.float64).unbind()
    x.requires_grad_()
    weights = {name: p.detach().requires_grad_() for name, p in by_name(mixer, lambda p: p.detach()).items()}
    y, expected = mixer(x)[0], formula(x, weights, mixer)
    torch.testing.assert_close(y, expected)
    expected = torch.autograd.grad(expected, [x, *weights.values()], dy)
    (of_x,) = torch.autograd.grad(y, x, dy, retain_graph=True)
    y.backward(dy)
    actual = [of_x, *by_name(mixer, lambda p: p.grad).values()]
    torch.testing.assert_close(actual, list(expected), rtol=1e-6, atol=1e-9)


def test_gates_of_any_size():
    mixer, x = GatedSlotAttention(SITE, num_slots=5), torch.randn(2, 150, 32)
    with torch.no_grad():
        mixer.in_proj.weight[-10:].mul_(3000)  # log decays of up to −300 a step, and of 0
    y = mixer(x)[0]
    gradients = torch.autograd.grad(y.sum(), list(mixer.parameters()))
    assert all(g.isfinite().all() for g in gradients)
    expected = mixer.double()(x.double())[0]
    assert (y.double() - expected).norm() < 1e-4 * expected.norm()


def test_sizes():
    mixer = GatedSlotAttention(Site(64, 4))
    assert mixer.matrix_shape == (4, 64, 16)
    assert mixer.state_size() == 4 * 64 * (16 + 16)
    assert Expanded(mixer=GatedSlotAttention, factor=2)(Site(64, 4)).state_size() == 2 * mixer.state_size()
    one_head = Expanded(mixer=GatedSlotAttention, factor=2, subheads=False)(Site(64, 4))
    assert one_head.state_size() == 4 * 64 * (32 + 16)
