"""Whole layers with copied weights against those of transformers: outputs, and gradients of inputs and weights."""

import inspect
from collections.abc import Callable, Mapping
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import kernels
import mixers
from mixers import GatedDeltaNet, Mamba2, Site, SlidingWindowAttention, SoftmaxAttention

pytestmark = pytest.mark.parity
TOLERANCE = 5e-6  # relative to the norm of the result: fp32 rounding of both sides
ZERO = 5e-6  # of terms of order one that cancel
LENGTHS = (1, 15, 130)
Oracle = Callable[[str], ModuleType]


def shaken(module: nn.Module) -> nn.Module:
    """Every parameter away from ones and zeros, where mistakes would not show."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module


def compare(
    ours: mixers.TokenMixer,
    theirs: nn.Module,
    call_theirs: Callable[[Tensor], Tensor],
    pairs: Mapping[str, Tensor | Callable[[Callable[[str], Tensor]], Tensor]],
    x: Tensor,
) -> None:
    """Outputs, and gradients of the input and of weights.

    Args:
        ours: The layer of this project.
        theirs: The layer it is compared with, with the same weights.
        call_theirs: Runs that one.
        pairs: For each of their parameters, its gradient put together from those of ours by name.
        x: The input.
    """
    arriving = torch.randn_like(x)
    our_x, their_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, z = ours(our_x)[0], call_theirs(their_x)
    (y * arriving).sum().backward()
    (z * arriving).sum().backward()
    found, expected = {"y": y, "gradient of x": our_x.grad}, {"y": z, "gradient of x": their_x.grad}
    # a fused matrix of ours, cut like its state dict
    gradients = {name: p.grad for name, p in ours.named_parameters()}
    widths = ours.in_proj.widths
    parts = gradients.pop("in_proj.weight").split(list(widths.values()))
    gradients |= {f"in_proj.{name}.weight": part for name, part in zip(widths, parts, strict=True)}
    for name, parameter in theirs.named_parameters():
        expected[name], found[name] = parameter.grad, pairs[name](gradients.__getitem__)
    for name, right in expected.items():
        error, norm = float((found[name] - right).detach().norm()), float(right.detach().norm())
        # a single token has gradients of zero: those of the decay, and of attention's queries and keys
        assert error <= TOLERANCE * norm + ZERO, f"{name}: error {error:.2g} at norm {norm:.2g}"


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("length", LENGTHS)
def test_mamba2(oracle: Oracle, length: int, groups: int, backend: str):
    theirs = oracle("transformers.models.mamba2.modeling_mamba2")
    sizes = {"hidden_size": 32, "expand": 2, "head_dim": 16, "state_size": 8, "n_groups": groups, "num_heads": 4}
    config = theirs.Mamba2Config(**sizes, chunk_size=64, layer_norm_epsilon=1e-5, num_hidden_layers=1)
    layer = shaken(theirs.Mamba2Mixer(config, 0)).eval()
    ours = Mamba2(Site(32, 4), head_dim=16, state_dim=8, num_groups=groups)

    # theirs convolves [x, B, C] at once, and projects to [z, x, B, C, dt]
    widths = [64, 8 * groups, 8 * groups]
    state = {"decay.A_log": layer.A_log, "decay.dt_bias": layer.dt_bias, "D": layer.D}
    state |= {"norm.weight": layer.norm.weight, "out_proj.weight": layer.out_proj.weight}
    state |= {"in_proj.weight": layer.in_proj.weight}
    for kind in ("weight", "bias"):
        parts = getattr(layer.conv1d, kind).split(widths)
        state |= {f"{name}_features.{kind}": part for name, part in zip("vkq", parts, strict=True)}
    ours.load_state_dict(state)

    pairs = {name: (lambda g, name=name: g(name)) for name in ("D", "norm.weight", "out_proj.weight")}
    pairs |= {name: (lambda g, name=name: g(f"decay.{name}")) for name in ("A_log", "dt_bias")}
    pairs["in_proj.weight"] = lambda g: torch.cat([g(f"in_proj.{n}.weight") for n in ("z", "x", "B", "C", "dt")])
    for kind in ("weight", "bias"):
        pairs[f"conv1d.{kind}"] = lambda g, kind=kind: torch.cat([g(f"{n}_features.{kind}") for n in "vkq"])
    with kernels.backend(backend):
        compare(ours, layer, layer, pairs, torch.randn(2, length, 32))


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("length", LENGTHS)
def test_gated_deltanet(oracle: Oracle, monkeypatch: pytest.MonkeyPatch, length: int, key_heads: int, backend: str):
    theirs = oracle("transformers.models.qwen3_next.modeling_qwen3_next")
    # Wherever flash-linear-attention is installed, theirs would call its kernels: take the PyTorch function behind.
    # And of its two the loop over time, because the chunked one sums decays in fp32 and loses digits of their gradient.
    plain = inspect.unwrap(theirs.torch_recurrent_gated_delta_rule)
    monkeypatch.setattr(theirs, "torch_chunk_gated_delta_rule", plain)
    K, V, H = 8, 12, 4
    config = theirs.Qwen3NextConfig(
        hidden_size=32,
        num_hidden_layers=1,
        linear_num_key_heads=key_heads,
        linear_num_value_heads=H,
        linear_key_head_dim=K,
        linear_value_head_dim=V,
        rms_norm_eps=1e-5,
        layer_types=["linear_attention"],
    )
    layer = shaken(theirs.Qwen3NextGatedDeltaNet(config, 0))
    layer.chunk_gated_delta_rule = plain  # where earlier versions look for it
    ours = GatedDeltaNet(Site(32, H), head_dim=K, value_dim=V, num_key_heads=key_heads)

    # theirs lays the projections out by key head: its q, its k, then v and z of all its value heads; and so b and a
    repeats = H // key_heads
    cuts = [K, K, repeats * V, repeats * V]
    state = {"decay.A_log": layer.A_log, "decay.dt_bias": layer.dt_bias}
    state |= {"o_norm.weight": layer.norm.weight, "o_proj.weight": layer.out_proj.weight}
    by_head = layer.in_proj_qkvz.weight.unflatten(0, (key_heads, -1)).split(cuts, 1)
    state |= {f"in_proj.{name}.weight": x.flatten(0, 1) for name, x in zip("qkvg", by_head, strict=True)}
    by_head = layer.in_proj_ba.weight.unflatten(0, (key_heads, -1)).split(repeats, 1)
    state |= {f"in_proj.{name}.weight": x.flatten(0, 1) for name, x in zip("ba", by_head, strict=True)}
    parts = layer.conv1d.weight.split([key_heads * K, key_heads * K, H * V])
    state |= {f"{name}_features.weight": part for name, part in zip("qkv", parts, strict=True)}
    ours.load_state_dict(state)

    def together(names: str):
        def gradient(g: Callable[[str], Tensor]) -> Tensor:
            return torch.cat([g(f"in_proj.{n}.weight").unflatten(0, (key_heads, -1)) for n in names], 1).flatten(0, 1)

        return gradient

    pairs = {
        "A_log": lambda g: g("decay.A_log"),
        "dt_bias": lambda g: g("decay.dt_bias"),
        "norm.weight": lambda g: g("o_norm.weight"),
        "out_proj.weight": lambda g: g("o_proj.weight"),
        "conv1d.weight": lambda g: torch.cat([g(f"{n}_features.weight") for n in "qkv"]),
        "in_proj_qkvz.weight": together("qkvg"),
        "in_proj_ba.weight": together("ba"),
    }
    with kernels.backend(backend):
        compare(ours, layer, layer, pairs, torch.randn(2, length, 32))


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("window", [None, 5, 64])
@pytest.mark.parametrize("length", [1, 15, 90])
def test_attention(oracle: Oracle, length: int, window: int | None, kv_heads: int, backend: str):
    theirs = oracle("transformers.models.llama.modeling_llama")
    config = theirs.LlamaConfig(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=16,
        attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    layer, rotary = shaken(theirs.LlamaAttention(config, 0)), theirs.LlamaRotaryEmbedding(config)
    if window is None:
        ours = SoftmaxAttention(Site(32, 4), num_kv_heads=kv_heads, head_dim=16)
    else:
        ours = SlidingWindowAttention(Site(32, 4), window_size=window, num_kv_heads=kv_heads, head_dim=16)
    state = {f"in_proj.{n}.weight": getattr(layer, f"{n}_proj").weight for n in "qkv"}
    ours.load_state_dict(state | {"o_proj.weight": layer.o_proj.weight})

    # theirs leaves the window to an explicit mask
    distance = torch.arange(length)[:, None] - torch.arange(length)
    seen = (distance >= 0) & (distance < (window or length))
    mask = torch.zeros(1, 1, length, length).masked_fill(~seen, -torch.inf)

    def call(x: Tensor) -> Tensor:
        return layer(x, position_embeddings=rotary(x, torch.arange(length)[None]), attention_mask=mask)[0]

    pairs = {f"{n}_proj.weight": (lambda g, n=n: g(f"in_proj.{n}.weight")) for n in "qkv"}
    pairs["o_proj.weight"] = lambda g: g("o_proj.weight")
    with kernels.backend(backend):
        compare(ours, layer, call, pairs, torch.randn(2, length, 32))


def test_importing_transformers_and_our_kernels(oracle: Oracle):
    # it asks any importable package called `kernels` for its version, and takes some versions for its own companion
    assert oracle("transformers").Mamba2Config.model_type == "mamba2"
    assert oracle("kernels") is kernels
