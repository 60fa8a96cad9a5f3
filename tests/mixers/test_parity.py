"""Whole layers with copied weights: outputs, and gradients of inputs and weights.

They are compared with the layers of transformers, with definitions written out around the naive recurrences of
flash-linear-attention, and, where neither has the layer, with the formula of the paper as full matrices over time.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import kernels
import mixers
from mixers import (
    GLA,
    HGRN1,
    HGRN2,
    TNL,
    TPE,
    CosFormer2,
    DeltaNet,
    Features,
    ForgettingAttention,
    GatedDeltaNet,
    GatedSlotAttention,
    LinearAttention,
    Mamba1,
    Mamba2,
    MultiheadLatentAttention,
    RetNet,
    Rotary,
    Site,
    SlidingWindowAttention,
    SoftmaxAttention,
)

TOLERANCE = 5e-6  # relative to the norm of the result: fp32 rounding of both sides
ZERO = 5e-6  # of terms of order one that cancel
LENGTHS = (1, 15, 130)
pytestmark = [
    pytest.mark.parity,
    pytest.mark.parametrize("backend", ["torch", "reference"]),
    pytest.mark.parametrize("length", LENGTHS),
]
Oracle = Callable[[str], ModuleType]


def shaken(module: nn.Module) -> nn.Module:
    """Every parameter away from ones and zeros, where mistakes would not show."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module


def by_name(mixer: nn.Module, of: Callable[[Tensor], Tensor | None]) -> dict[str, Tensor | None]:
    """Something of each parameter; a fused matrix is cut like its state dict."""
    actual = {name: of(parameter) for name, parameter in mixer.named_parameters()}
    for name, module in mixer.named_modules():
        if isinstance(module, mixers.Projection):
            parts = actual.pop(f"{name}.weight").split(list(module.widths.values()))
            actual |= {f"{name}.{part}.weight": x for part, x in zip(module.widths, parts, strict=True)}
    return actual


def agree(
    actual: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None], tolerance: float = TOLERANCE
) -> None:
    assert actual.keys() == expected.keys()
    for name, right in expected.items():
        if right is None:  # a parameter that has no part in it
            assert actual[name] is None, name
            continue
        error, norm = float((actual[name].double() - right.double()).detach().norm()), float(right.detach().norm())
        # a single token has gradients of zero: those of the decay, and of attention's queries and keys
        assert error <= tolerance * norm + ZERO, f"{name}: error {error:.2g} at norm {norm:.2g}"


def named(layer: nn.Module, names: Mapping[str, str]) -> dict[str, Tensor]:
    """Return weights of another library's layer under our names; `names` maps our names to its modules."""
    return {f"{our}.weight": layer.get_submodule(name).weight for name, our in names.items()}


def fused(mixer: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters of a mixer, of weights that are named as in its state dict."""
    actual = dict(weights)
    for name, module in mixer.named_modules():
        if isinstance(module, mixers.Projection) and f"{name}.weight" not in actual:
            actual[f"{name}.weight"] = torch.cat([actual.pop(f"{name}.{part}.weight") for part in module.widths])
    assert actual.keys() == dict(mixer.named_parameters()).keys()
    return actual


def compare(
    ours: mixers.TokenMixer,
    theirs: nn.Module,
    weights: Mapping[str, Tensor],
    x: Tensor,
    call_theirs: Callable[[Tensor], Tensor] | None = None,
    tolerance: float = TOLERANCE,
) -> None:
    """Compare outputs, and gradients of the input and of the other library's parameters.

    Args:
        ours: The layer of this project.
        theirs: The layer it is compared with.
        weights: Weights of `ours`, computed from the parameters of `theirs`.
        x: The input.
        call_theirs: Calls `theirs`, if it takes more than x.
        tolerance: Largest error relative to the norm of a result.
    """
    names, arriving, results = [name for name, _ in theirs.named_parameters()], torch.randn_like(x), []
    for call in (lambda x: functional_call(ours, fused(ours, weights), (x,))[0], call_theirs or theirs):
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        gradients = torch.autograd.grad((y * arriving).sum(), [leaf, *theirs.parameters()], allow_unused=True)
        results.append({"y": y, **dict(zip(["gradient of x", *names], gradients, strict=True))})
    agree(*results, tolerance)


Weights = Mapping[str, Tensor]


def compare_with_formula(
    ours: mixers.TokenMixer,
    formula: Callable[[Tensor, Weights], Tensor],
    x: Tensor,
    backend: str = "torch",
    tolerance: float = TOLERANCE,
) -> None:
    """Outputs, and gradients of the input and of all weights.

    Args:
        ours: The layer of this project, computing in fp32.
        formula: The same of x and the weights of ours by name, in fp64.
        x: The input.
        backend: Where ours runs.
        tolerance: Largest error relative to the norm of a result.
    """
    weights = by_name(ours, lambda parameter: parameter.detach().double().requires_grad_())
    leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
    our_x, their_x = x.clone().requires_grad_(), x.double().requires_grad_()
    with kernels.backend(backend):
        y = ours(our_x)[0]
    z, arriving = formula(their_x, leaves), torch.randn_like(x)
    (y * arriving).sum().backward()
    gradients = torch.autograd.grad((z * arriving).sum(), [their_x, *leaves.values()], allow_unused=True)
    actual = {"y": y, "gradient of x": our_x.grad, **by_name(ours, lambda parameter: parameter.grad)}
    agree(actual, {"y": z, **dict(zip(["gradient of x", *leaves], gradients, strict=True))}, tolerance)


def linear(x: Tensor, weights: Weights, *names: str) -> list[Tensor]:
    return [F.linear(x, weights[f"{name}.weight"]) for name in names]


def alike(mixer: mixers.LinearMixer) -> mixers.LinearMixer:
    """Keys that resemble their queries: the norm would blow up the rounding of a first q·k that is nearly zero."""
    with torch.no_grad():
        q, k, *_ = mixer.in_proj.weight.split(list(mixer.in_proj.widths.values()))
        k.mul_(0.3).add_(q)
    return mixer


def conv_silu(x: Tensor, weight: Tensor) -> Tensor:
    taps = weight.shape[-1]
    return F.silu(F.conv1d(F.pad(x.mT, (taps - 1, 0)), weight, groups=x.shape[-1]).mT)


def rms(x: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def causal(scores: Tensor, v: Tensor) -> Tensor:
    """Scores [B,H,T,T], of which those of the future do not count, times v [B,T,H,V]."""
    return torch.einsum("bhts,bshv->bthv", scores.tril(), v)


def attending(
    layer: nn.Module, rotary: nn.Module, length: int, window: int | None = None
) -> Callable[[Tensor], Tensor]:
    """Call a layer of transformers, which leaves the window to an explicit mask."""
    past = torch.arange(length)[:, None] - torch.arange(length)
    mask = torch.zeros(1, 1, length, length).masked_fill((past < 0) | (past >= (window or length)), -torch.inf)
    places = torch.arange(length)[None]
    return lambda x: layer(x, position_embeddings=rotary(x, places), attention_mask=mask)[0]


def distance(length: int) -> Tensor:
    time = torch.arange(length, dtype=torch.float64)
    return time[:, None] - time


@pytest.mark.parametrize("groups", [1, 2])
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
    parts = layer.in_proj.weight.split([64, *widths, 4])
    state |= {f"in_proj.{name}.weight": part for name, part in zip(("z", "x", "B", "C", "dt"), parts, strict=True)}
    for kind in ("weight", "bias"):
        parts = getattr(layer.conv1d, kind).split(widths)
        state |= {f"{name}_features.{kind}": part for name, part in zip("vkq", parts, strict=True)}
    with kernels.backend(backend):
        compare(ours, layer, state, torch.randn(2, length, 32))


@pytest.mark.slow
@pytest.mark.parametrize("key_heads", [4, 2])
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
    ours = GatedDeltaNet(Site(32, H), num_heads=H, head_dim=K, value_dim=V, num_key_heads=key_heads)

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
    with kernels.backend(backend):
        compare(ours, layer, state, torch.randn(2, length, 32))


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("window", [None, 5, 64])
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
        ours = SoftmaxAttention(Site(32, 4), num_heads=4, num_kv_heads=kv_heads, head_dim=16)
    else:
        ours = SlidingWindowAttention(Site(32, 4), window_size=window, num_heads=4, num_kv_heads=kv_heads, head_dim=16)
    weights = named(layer, {f"{n}_proj": f"in_proj.{n}" for n in "qkv"} | {"o_proj": "o_proj"})

    with kernels.backend(backend):
        compare(ours, layer, weights, torch.randn(2, length, 32), attending(layer, rotary, length, window))


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("pro", [False, True])
def test_forgetting_attention(oracle: Oracle, length: int, pro: bool, kv_heads: int, backend: str):
    naive, H = oracle("fla.ops.forgetting_attn.naive").naive_forgetting_attn, 4
    options = {"qk_norm": mixers.RMSNorm, "shift": True, "output": mixers.SigmoidGatedRMSNorm} if pro else {}
    ours = shaken(ForgettingAttention(Site(32, H), num_kv_heads=kv_heads, **options))

    def shifted(x: Tensor, share: Tensor) -> Tensor:
        share = share.sigmoid()[..., None]
        return share * F.pad(x[:, :-1], (0, 0, 0, 0, 1, 0)) + (1 - share) * x

    def formula(x: Tensor, w: Weights) -> Tensor:
        q, k, v, f = linear(x, w, *(f"in_proj.{n}" for n in "qkvf"))
        q, k, v = q.unflatten(-1, (H, -1)), k.unflatten(-1, (kv_heads, -1)), v.unflatten(-1, (kv_heads, -1))
        if pro:
            of_k, of_v = linear(x, w, "in_proj.shift")[0].chunk(2, -1)
            k, v = shifted(k, of_k), shifted(v, of_v)
            q, k = rms(q, 1e-6) * w["q_norm.weight"], rms(k, 1e-6) * w["k_norm.weight"]
        o = naive(q, k, v, F.logsigmoid(f + w["f_bias"])).to(x)
        if pro:
            gate = linear(x, w, "in_proj.g")[0].unflatten(-1, (H, -1)).sigmoid()
            o = rms(o, 1e-5) * w["o_norm.norm.weight"] * gate
        return F.linear(o.flatten(2), w["o_proj.weight"])

    # both sum the decays in fp32
    compare_with_formula(ours, formula, torch.randn(2, length, 32), backend, tolerance=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("q_rank", [None, 10])
def test_latent_attention(oracle: Oracle, length: int, q_rank: int | None, backend: str):
    theirs = oracle("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = theirs.DeepseekV3Config(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=q_rank,
        kv_lora_rank=12,
        qk_nope_head_dim=8,
        qk_rope_head_dim=6,
        v_head_dim=10,
        rope_interleave=False,
        attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    layer, rotary = shaken(theirs.DeepseekV3Attention(config, 0)), theirs.DeepseekV3RotaryEmbedding(config)
    sizes = {"num_heads": 4, "head_dim": 8, "rope_dim": 6, "value_dim": 10, "kv_rank": 12, "q_rank": q_rank}
    ours = MultiheadLatentAttention(Site(32, 4), **sizes)

    names = {"q_proj": "in_proj.q"} if q_rank is None else {"q_a_proj": "in_proj.q", "q_b_proj": "q_up"}
    names |= {} if q_rank is None else {"q_a_layernorm": "q_norm"}
    names |= {"kv_a_layernorm": "latent_norm", "kv_b_proj": "kv_up", "o_proj": "o_proj"}
    latent, shared = layer.kv_a_proj_with_mqa.weight.split([12, 6])
    weights = named(layer, names) | {"in_proj.latent.weight": latent, "in_proj.shared.weight": shared}

    with kernels.backend(backend):
        compare(ours, layer, weights, torch.randn(2, length, 32), attending(layer, rotary, length))


@pytest.mark.slow
def test_gated_latent_attention_of_ling(oracle: Oracle, length: int, backend: str):
    """Heads with a gate each, of which 6 of 14 channels turn."""
    theirs = oracle("transformers.models.bailing_hybrid.modeling_bailing_hybrid")
    sizes = dict(kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=6, v_head_dim=10)
    heads = dict(num_attention_heads=4, num_key_value_heads=4)
    config = theirs.BailingHybridConfig(hidden_size=32, attn_implementation="eager", **heads, **sizes)
    layer, rotary = shaken(theirs.BailingHybridAttention(config, 0)), theirs.BailingHybridRotaryEmbedding(config)
    ours = MultiheadLatentAttention(
        Site(32, 4), head_dim=8, rope_dim=6, value_dim=10, kv_rank=12, gate="head", rotary=partial(Rotary, base=6e6)
    )

    # channels that turn together are neighbours there, and half of what turns apart here
    halves = [0, 2, 4, 1, 3, 5]
    q = torch.arange(4 * 14).view(4, 14)
    q = torch.cat([q[:, :8], q[:, 8:][:, halves]], 1).flatten()
    kv = torch.cat([torch.arange(12), 12 + torch.tensor(halves)])
    latent, shared = layer.kv_a_proj_with_mqa.weight[kv].split([12, 6])
    names = {"kv_a_layernorm": "latent_norm", "kv_b_proj": "kv_up", "o_proj": "o_proj", "g_proj": "in_proj.g"}
    weights = named(layer, names) | {"in_proj.latent.weight": latent, "in_proj.shared.weight": shared}
    weights["in_proj.q.weight"] = layer.q_proj.weight[q]

    with kernels.backend(backend):
        compare(ours, layer, weights, torch.randn(2, length, 32), attending(layer, rotary, length))


@pytest.mark.slow
def test_latent_attention_of_glm_without_shared_channels(oracle: Oracle, length: int, backend: str):
    """With all keys selected, as for sequences shorter than `index_topk`."""
    theirs = oracle("transformers.models.glm5_next.modeling_glm5_next")
    sizes = dict(q_lora_rank=14, kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=0, v_head_dim=10)
    heads = dict(num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=1)
    config = theirs.Glm5NextTextConfig(hidden_size=32, attn_implementation="eager", **heads, **sizes)
    config.indexer_types = ["shared"]
    layer = shaken(theirs.Glm5NextTextAttention(config, 0))
    ours = MultiheadLatentAttention(
        Site(32, 4),
        head_dim=8,
        rope_dim=0,
        value_dim=10,
        kv_rank=12,
        q_rank=14,
        rotary=None,
        norm=partial(mixers.RMSNorm, eps=config.rms_norm_eps),
    )
    names = {"q_a_proj": "in_proj.q", "q_a_layernorm": "q_norm", "q_b_proj": "q_up", "kv_b_proj": "kv_up"}
    names |= {"kv_a_proj_with_mqa": "in_proj.latent", "kv_a_layernorm": "latent_norm", "o_proj": "o_proj"}
    keys = torch.arange(length).expand(2, length, length)
    selected = keys.masked_fill(torch.ones(length, length).triu(1).bool(), -1)

    def call(x: Tensor) -> Tensor:
        return layer(x, attention_mask=None, prev_topk_indices=selected)[0]

    with kernels.backend(backend):
        compare(ours, layer, named(layer, names), torch.randn(2, length, 32), call)


def test_mamba1(oracle: Oracle, length: int, backend: str):
    theirs = oracle("transformers.models.mamba.modeling_mamba")
    config = theirs.MambaConfig(hidden_size=32, state_size=16, expand=2, time_step_rank=3, num_hidden_layers=1)
    layer = shaken(theirs.MambaMixer(config, 0)).eval()
    ours = Mamba1(Site(32, 4), dt_rank=3)

    renamed = {"conv1d.weight": "x_features.weight", "conv1d.bias": "x_features.bias", "dt_proj.bias": "dt_bias"}
    weights = {renamed.get(name, name): x for name, x in layer.named_parameters()}
    with kernels.backend(backend):
        compare(ours, layer, weights, torch.randn(2, length, 32))


@pytest.mark.slow
@pytest.mark.parametrize("conv", [0, 4])
def test_gla(oracle: Oracle, length: int, conv: int, backend: str):
    naive, H = oracle("fla.ops.gla.naive").naive_recurrent_gla, 4
    # its own defaults, and the form with short convolutions
    features = Features(4, activation="silu") if conv else Features()
    ours = alike(shaken(GLA(Site(32, H), expand_k=1 if conv else 0.5, qk=features, v=features)))

    def formula(x: Tensor, w: Weights) -> Tensor:
        q, k, v, g, low = linear(x, w, *(f"in_proj.{n}" for n in ("q", "k", "v", "g", "decay")))
        if conv:
            q, k, v = (conv_silu(s, w[f"{n}_features.weight"]) for n, s in zip("qkv", (q, k, v), strict=True))
        decay = F.logsigmoid(F.linear(low, w["decay_up.weight"], w["decay_up.bias"])) / 16
        q, k, v, g, decay = (s.unflatten(-1, (H, -1)) for s in (q, k, v, g, decay))
        o, _ = naive(q=q, k=k, v=v, gk=decay)
        return F.linear((rms(o, 1e-5) * w["o_norm.weight"] * F.silu(g)).flatten(2), w["o_proj.weight"])

    compare_with_formula(ours, formula, torch.randn(2, length, 32), backend)


@pytest.mark.parametrize("conv", [0, 4])
def test_gated_slot_attention(oracle: Oracle, length: int, conv: int, backend: str):
    naive, H = oracle("fla.ops.gsa.naive").naive_recurrent_gsa, 4
    features = Features(conv, activation="silu")
    ours = shaken(GatedSlotAttention(Site(32, H), num_slots=6, qk=features, v=features))

    def formula(x: Tensor, w: Weights) -> Tensor:
        *streams, f = linear(x, w, *(f"in_proj.{n}" for n in "qkvf"))
        q, k, v = (
            conv_silu(s, w[f"{n}_features.weight"]) if conv else F.silu(s) for n, s in zip("qkv", streams, strict=True)
        )
        decay = F.logsigmoid(f) / 8
        q, k, v, decay = (s.unflatten(-1, (H, -1)) for s in (q, k, v, decay))
        o, _ = naive(q=q, k=k, v=v, s=1 - decay.exp(), g=decay, scale=1.0)
        return F.linear(rms(F.silu(o.flatten(2)), 1e-5) * w["g_norm.weight"], w["o_proj.weight"])

    compare_with_formula(ours, formula, torch.randn(2, length, 32), backend)


def forget_gate(raw: Tensor, w: Weights, layer: int) -> Tensor:
    """Section 2.2 of arXiv 2404.07904: lower bounds are cumsum(softmax) over layers, minus the first row."""
    if layer == 0:  # the first bound is zero whatever the matrix is, and ours has none there
        return raw.sigmoid()
    share = w["lower_bounds.weight"].softmax(0)
    bounds = share.cumsum(0) - share[:1]
    return bounds[layer] + (1 - bounds[layer]) * raw.sigmoid()


@pytest.mark.slow
@pytest.mark.parametrize("layer", [0, 1, 3])
def test_hgrn2(oracle: Oracle, length: int, layer: int, backend: str):
    naive, H = oracle("fla.ops.gla.naive").naive_recurrent_gla, 4
    ours = shaken(HGRN2(Site(32, H, layer=layer, num_layers=4)))
    if layer:
        nn.init.normal_(ours.lower_bounds.weight)

    def formula(x: Tensor, w: Weights) -> Tensor:
        q, f, i = linear(x, w, "in_proj.q", "in_proj.f", "in_proj.i")
        f = forget_gate(f, w, layer)
        q, f, i = (s.unflatten(-1, (H, -1)) for s in (F.silu(q), f, i))
        o, _ = naive(q=q, k=1 - f, v=i, gk=f.log())
        return F.linear(rms(o.flatten(2), 1e-5) * w["g_norm.weight"], w["o_proj.weight"])

    compare_with_formula(ours, formula, torch.randn(2, length, 32), backend)


@pytest.mark.parametrize("layer", [0, 1, 3])
def test_hgrn1(oracle: Oracle, length: int, layer: int, backend: str):
    naive = oracle("fla.ops.hgrn.naive").naive_recurrent_hgrn
    ours = shaken(HGRN1(Site(32, 4, layer=layer, num_layers=4)))
    if layer:
        nn.init.normal_(ours.lower_bounds.weight)

    def formula(x: Tensor, w: Weights) -> Tensor:
        i, f, g = linear(x, w, "in_proj.i", "in_proj.f", "in_proj.g")
        f = forget_gate(f, w, layer)
        h, _ = naive(x=(1 - f) * F.silu(i), g=f.log())
        return F.linear(rms(h, 1e-5) * w["g_norm.weight"] * F.silu(g), w["o_proj.weight"])

    compare_with_formula(ours, formula, torch.randn(2, length, 32), backend)


@pytest.mark.slow
@pytest.mark.parametrize("allow_neg_eigval", [False, True])
def test_deltanet(oracle: Oracle, length: int, allow_neg_eigval: bool, backend: str):
    naive, H = oracle("fla.ops.delta_rule.naive").delta_rule_recurrence, 4
    ours = shaken(DeltaNet(Site(32, H), allow_neg_eigval=allow_neg_eigval))

    def formula(x: Tensor, w: Weights) -> Tensor:
        streams = linear(x, w, "in_proj.q", "in_proj.k", "in_proj.v")
        q, k, v = (conv_silu(s, w[f"{n}_features.weight"]) for n, s in zip("qkv", streams, strict=True))
        q, k, v = (s.unflatten(-1, (H, -1)).transpose(1, 2) for s in (q, k, v))
        q, k = (s / (s.square().sum(-1, keepdim=True) + 1e-6).sqrt() for s in (q, k))
        beta = (2 if allow_neg_eigval else 1) * linear(x, w, "in_proj.b")[0].sigmoid().mT
        o, _ = naive(q, k, v, beta)
        o = rms(o.transpose(1, 2), 1e-5) * w["o_norm.weight"]
        return F.linear(o.flatten(2), w["o_proj.weight"])

    compare_with_formula(ours, formula, torch.randn(2, length, 32), backend)


def test_retnet(oracle: Oracle, length: int, backend: str):
    naive, H, K = oracle("fla.ops.retention.naive").naive_retention, 4, 8
    ours = alike(shaken(RetNet(Site(32, H))))

    def rotate(x: Tensor) -> Tensor:  # x [B,T,H,K]: the halves are the two parts of complex numbers
        angle = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(K // 2, dtype=x.dtype) / (K // 2))
        turned = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)[:, None]
        return torch.cat([turned.real, turned.imag], -1)

    def formula(x: Tensor, w: Weights) -> Tensor:
        streams = linear(x, w, *(f"in_proj.{n}" for n in "qkvg"))
        q, k, v, g = (s.unflatten(-1, (H, -1)) for s in streams)
        o = naive(*(s.transpose(1, 2) for s in (rotate(q), rotate(k), v))).transpose(1, 2)
        return F.linear((rms(o, 1e-5) * w["o_norm.weight"] * F.silu(g)).flatten(2), w["o_proj.weight"])

    compare_with_formula(ours, formula, torch.randn(2, length, 32), backend)


def gated_by_bottleneck(o: Tensor, x: Tensor, w: Weights) -> Tensor:
    """Equations 9 and 17 of arXiv 2406.16690: Norm(Concat[O_1 … O_h]) ⊙ Sigmoid(X W_down W_up), then W_o."""
    gate = F.linear(*linear(x, w, "in_proj.g"), w["g_up.weight"]).sigmoid()
    return F.linear(rms(o.flatten(2), 1e-6) * gate, w["o_proj.weight"])


# ALiBi's own construction, written out: 2^(−8i/4); for 6 heads those of 4, then every other one of 8
ALIBI = {4: [2**-2, 2**-4, 2**-6, 2**-8], 6: [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]}


@pytest.mark.slow
@pytest.mark.parametrize("heads", ALIBI)
@pytest.mark.parametrize("layer", [0, 1, 3])
def test_tnl(length: int, layer: int, heads: int, backend: str):
    K, depth = 8, {0: 1 + 1e-5, 1: 2 / 3 + 1e-5, 3: 1e-5}[layer]
    ours = shaken(TNL(Site(heads * K, heads, layer=layer, num_layers=4)))

    def formula(x: Tensor, w: Weights) -> Tensor:
        q, k, v = (s.unflatten(-1, (heads, K)) for s in linear(x, w, "in_proj.q", "in_proj.k", "in_proj.v"))
        slopes = torch.tensor(ALIBI[heads], dtype=x.dtype)[:, None, None]
        kept = (-slopes * depth * distance(length)).exp()
        # the norm removes the scale K^-½, up to its eps
        scores = torch.einsum("bthk,bshk->bhts", F.silu(q), F.silu(k)) * K**-0.5
        return gated_by_bottleneck(causal(scores * kept, v), x, w)

    compare_with_formula(ours, formula, torch.randn(2, length, heads * K), backend)


def test_cosformer2(length: int, backend: str):
    H, K = 4, 8
    ours = shaken(CosFormer2(Site(32, H)))

    def formula(x: Tensor, w: Weights) -> Tensor:
        # cos(θt)cos(θs) + sin(θt)sin(θs) = cos(θ(t − s)): nothing is concatenated here
        q, k, v = (s.unflatten(-1, (H, K)) for s in linear(x, w, "in_proj.q", "in_proj.k", "in_proj.v"))
        turned = (w["q_features.map.theta"][:, :, None, None] * distance(length)).cos()  # [H,K,T,T]
        scores = torch.einsum("bthk,bshk,hkts->bhts", F.silu(q), F.silu(k), turned) * (2 * K) ** -0.5
        return gated_by_bottleneck(causal(scores, v), x, w)

    compare_with_formula(ours, formula, torch.randn(2, length, 32), backend)


@pytest.mark.parametrize(
    ("activation", "by_hand"),
    [("elu1", lambda x: torch.where(x > 0, x + 1, x.exp())), ("relu", torch.relu), ("identity", lambda x: x)],
)
def test_linear_attention(length: int, activation: str, by_hand: Callable[[Tensor], Tensor], backend: str):
    H, K = 4, 8
    ours = alike(shaken(LinearAttention(Site(32, H), qk=Features(activation=activation))))

    def formula(x: Tensor, w: Weights) -> Tensor:
        q, k, v = (s.unflatten(-1, (H, K)) for s in linear(x, w, "in_proj.q", "in_proj.k", "in_proj.v"))
        o = causal(torch.einsum("bthk,bshk->bhts", by_hand(q), by_hand(k)) * K**-0.5, v)
        return F.linear((rms(o, 1e-5) * w["o_norm.weight"]).flatten(2), w["o_proj.weight"])

    compare_with_formula(ours, formula, torch.randn(2, length, 32), backend)


@pytest.mark.parametrize("size", [1, 6])
def test_tpe(length: int, size: int, backend: str):
    ours = shaken(TPE(Site(32, 4), size=size))

    def formula(x: Tensor, w: Weights) -> Tensor:
        rate = 2.0 ** -(-4 + torch.arange(size, dtype=x.dtype) * (17 / max(size - 1, 1)))
        kept = (-rate[:, None, None] * distance(length)).exp().tril()  # λ_e^(t−s), [e,T,T]
        return torch.einsum("ce,ets,bsc->btc", w["weight"], kept, x)

    compare_with_formula(ours, formula, torch.randn(2, length, 32), backend)
