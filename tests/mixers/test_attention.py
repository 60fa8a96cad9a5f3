import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import mixers
import zoo
from mixers import Features, Rotary, Site, SlidingWindowAttention, SoftmaxAttention

SITE = Site(hidden_size=32, num_heads=4)


def influence(mixer: mixers.TokenMixer, length: int, on: int) -> list[int]:
    """The tokens that the output at `on` depends on."""
    x = torch.randn(1, length, 32, dtype=torch.float64, requires_grad=True)
    gradient = torch.autograd.grad(mixer.double()(x)[0][:, on].square().sum(), x)[0]
    return [t for t in range(length) if gradient[0, t].any()]


@pytest.mark.parametrize("length", [20, 90])  # shorter and longer than a block
@pytest.mark.parametrize("window", [2, 5])
def test_a_window_counts_the_token_itself(window: int, length: int):
    # w − 1 positions back still has influence, w positions back has none
    seen = influence(SlidingWindowAttention(SITE, window_size=window), length, on=length - 4)
    assert seen == list(range(length - 4 - window + 1, length - 3))


def test_the_cache_holds_the_last_keys():
    mixer = SlidingWindowAttention(SITE, window_size=6, num_kv_heads=2, qk=mixers.Features())
    state = mixer.init_state(2)
    assert state.k.shape == state.v.shape == (2, 5, 2, 8)
    x = torch.randn(2, 9, 32)
    _, k, v = mixer.in_proj(x)
    _, state = mixer(x[:, :3], state)
    assert torch.equal(state.position, torch.tensor([3, 3]))
    assert not state.k[:, :2].any()  # flush right
    torch.testing.assert_close(state.k[:, 2:].flatten(2), k[:, :3])
    _, state = mixer(x[:, 3:], state)
    torch.testing.assert_close(state.k.flatten(2), k[:, 4:])
    torch.testing.assert_close(state.v.flatten(2), v[:, 4:])


def test_state_sizes():
    full = SoftmaxAttention(SITE, num_kv_heads=2)
    assert full.state_size(10) == 2 * 10 * 2 * 8
    assert full.state_size() == math.inf
    assert not full.constant_state
    window = SlidingWindowAttention(SITE, window_size=6)
    assert window.state_size() == window.state_size(100) == 2 * 5 * 32
    assert window.state_size(3) == 2 * 3 * 32


@pytest.mark.parametrize("window", [None, 5, 64, 1000])
def test_flops_of_what_the_mask_leaves_out(window: int | None):
    mixer = SoftmaxAttention(SITE) if window is None else SlidingWindowAttention(SITE, window_size=window)
    pairs = sum(min(t + 1, window or 300) for t in range(300))
    products = 2 * 300 * sum(parameter.numel() for parameter in mixer.parameters())
    # two products over 32 channels for each pair
    assert mixer.flops(300) - mixer.masked_flops(300) == products + 2 * 2 * 32 * pairs


def normed(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x: Tensor, base: float, count: int) -> Tensor:
    """Rotary positions of the first `count` entries of heads [T,heads,size], as complex numbers."""
    angle = torch.arange(len(x))[:, None, None] * base ** (-torch.arange(0, count, 2) / count)
    pairs = torch.complex(x[..., : count // 2], x[..., count // 2 : count]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([pairs.real, pairs.imag, x[..., count:]], -1)


def by_hand(x: Tensor, w: dict[str, Tensor], options: dict[str, Any]) -> Tensor:
    """Attention of 4 query heads of size 8 over 2 key heads, for one sequence x [T,32]."""
    project = lambda name: x @ w[f"in_proj.{name}.weight"].T + w.get(f"in_proj.{name}.bias", 0)  # noqa: E731
    q, k, v = project("q"), project("k"), project("v").unflatten(-1, (2, 8))
    wide = options.get("qk_norm_over") == "width"
    q, k = (y if wide else y.unflatten(-1, (-1, 8)) for y in (q, k))
    if norm := options.get("qk_norm"):
        first = 1 if norm is mixers.ZeroCentredRMSNorm else 0
        q, k = normed(q, first + w["q_norm.weight"]), normed(k, first + w["k_norm.weight"])
    q, k = (y.unflatten(-1, (-1, 8)) if wide else y for y in (q, k))
    rotary = options.get("qk", Features(map=Rotary)).map
    if rotary is not None:
        inputs = getattr(rotary, "keywords", {})
        q, k = (turned(y, inputs.get("base", 1e4), int(8 * inputs.get("fraction", 1))) for y in (q, k))
    outputs = []
    for head in range(4):
        scores = q[:, head] @ k[:, head // 2].T * options.get("scale", 8**-0.5)
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        outputs.append(scores.softmax(-1) @ v[:, head // 2])
    o = torch.stack(outputs, 1)
    if "gate" in options:
        o = o * project("g").unflatten(-1, (4, -1)).sigmoid()
    return o.flatten(1) @ w["o_proj.weight"].T + w.get("o_proj.bias", 0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"qk": Features()},
        {"qk": Features(map=partial(Rotary, base=1e6))},
        {"qk": Features(map=partial(Rotary, fraction=0.25))},
        {"qk_norm": mixers.RMSNorm},
        {"qk_norm": mixers.ZeroCentredRMSNorm},
        {"qk_norm": mixers.RMSNorm, "qk_norm_over": "width"},
        {"gate": "head"},
        {"gate": "channel"},
        {"bias": True},
        {"output_bias": True},
        {"scale": 0.7},
        {
            "qk": Features(map=partial(Rotary, base=1e7, fraction=0.5)),
            "qk_norm": mixers.ZeroCentredRMSNorm,
            "gate": "channel",
            "bias": True,
            "output_bias": True,
        },
    ],
    ids=str,
)
def test_options_are_the_formula(options: dict[str, Any]):
    torch.manual_seed(0)
    mixer, x = SoftmaxAttention(SITE, num_kv_heads=2, **options), torch.randn(13, 32, requires_grad=True)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    parts = {name: part.clone().requires_grad_() for name, part in mixer.state_dict().items()}
    expected, dy = by_hand(x, parts, options), torch.randn(13, 32)
    y = mixer(x[None])[0][0]
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
    y.backward(dy)
    with torch.no_grad():  # gradients under the names of the parts
        for parameter in mixer.parameters():
            parameter.copy_(parameter.grad)
    actual = {"x": dx, **mixer.state_dict()}
    wanted = torch.autograd.grad(expected, [x, *parts.values()], dy)
    for (name, gradient), by_formula in zip(actual.items(), wanted, strict=True):
        assert torch.allclose(gradient, by_formula, rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("config", ["transformer.yaml", "swa.yaml"])
def test_options_in_a_config(config: str):
    mixer = "model.stack.mixer."
    (attention,) = zoo.build(
        config,
        *("model.vocab_size=64", "model.hidden_size=64", "model.num_heads=2", "model.num_layers=1"),
        *(f"{mixer}gate=channel", f"{mixer}qk_norm_over=width", f"{mixer}bias=true"),
        f"{mixer}qk_norm={{class_path: ZeroCentredRMSNorm, init_args: {{eps: 1.0e-5}}}}",
        f"{mixer}qk.map={{class_path: Rotary, init_args: {{base: 1.0e+6, fraction: 0.25}}}}",
    ).mixers
    assert attention.q_norm.weight.shape == (64,)
    assert attention.q_norm.eps == 1e-5
    assert (attention.q_features.map.base, attention.q_features.map.turning) == (1e6, 8)
    assert set(attention.in_proj.widths) == {"q", "k", "v", "g"}
