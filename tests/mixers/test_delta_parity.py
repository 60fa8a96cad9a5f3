"""KDA, Gated DeltaNet-2, Comba, Gated DeltaProduct and RWKV-7 with copied weights: outputs, and all gradients.

They are compared with layers written out around the naive recurrences of flash-linear-attention, KDA also with the
layer of transformers, and Comba with the formula of the paper in fp64. Of the two naive functions of Comba, the one in
chunks reads the state before it decays, as the kernels and the paper do, and the loop after it.
"""

import inspect
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from mixers import (
    KDA,
    RWKV7,
    BoundedChannelDecay,
    ChannelDecay,
    Comba,
    GatedDeltaNet,
    GatedDeltaNet2,
    GatedDeltaProduct,
    LinearMixer,
    Preconditioner,
    Site,
)
from mixers.two_layers import TwoLayers

from .test_parity import LENGTHS, Oracle, Weights, compare, compare_with_formula, conv_silu, linear, rms, shaken

pytestmark = [
    pytest.mark.parity,
    pytest.mark.slow,
    pytest.mark.pairwise,
    pytest.mark.parametrize("backend", ["torch", "reference"]),
    pytest.mark.parametrize("length", LENGTHS),
]
TOLERANCE = 3e-5  # the naive functions compute in fp32, too, and gradients of decays are sums of terms that cancel
SITE = Site(32, 4)
SIZES = {"num_heads": 4, "num_key_heads": 2, "head_dim": 8, "value_dim": 12}
H, G, K, V = SIZES.values()
RWKV7_SMALL = partial(RWKV7, head_dim=8, rate_rank=5, value_rank=3, gate_rank=6)


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def streams(x: Tensor, w: Weights, *, steps: int = 1, key_heads: int = G) -> list[Tensor]:
    """q [B,T,G,K], k [B,T,n·G,K] and v [B,T,n·H,V] after convolution and SiLU."""
    raw = linear(x, w, "in_proj.q", "in_proj.k", "in_proj.v")
    made = [conv_silu(s, w[f"{name}_features.weight"]) for name, s in zip("qkv", raw, strict=True)]
    heads = (key_heads, steps * key_heads, steps * H)
    return [s.unflatten(-1, (count, -1)) for s, count in zip(made, heads, strict=True)]


def low_rank(x: Tensor, w: Weights) -> tuple[Tensor, Tensor]:
    """Raw decays, and the output gate, each of full rank without a second matrix."""
    f, g = linear(x, w, "in_proj.f", "in_proj.g")
    f = F.linear(f, w["decay_up.weight"]) if "decay_up.weight" in w else f
    return f, (F.linear(g, w["g_up.weight"], w["g_up.bias"]) if "g_up.weight" in w else g).sigmoid()


def output(o: Tensor, gate: Tensor, w: Weights, norm: str = "o_norm.norm.weight") -> Tensor:
    return F.linear(((rms(o, 1e-5) * w[norm]).flatten(2)) * gate, w["o_proj.weight"])


def channel_decay(f: Tensor, w: Weights, heads: int, bound: float | None = None) -> Tensor:
    f, A = (f + w["decay.dt_bias"]).unflatten(-1, (heads, -1)), w["decay.A_log"].exp()[:, None]
    return -A * F.softplus(f) if bound is None else bound * (A * f).sigmoid()


def head_decay(x: Tensor, w: Weights) -> Tensor:
    return -w["decay.A_log"].exp() * F.softplus(linear(x, w, "in_proj.a")[0] + w["decay.dt_bias"])


FULL_RANKS = {
    "low rank": {},
    "gate of full rank": {"full_rank_gate": True, "gate_bias": False},
    "decay of full rank": {"full_rank_decay": True},
    "both of full rank": {"full_rank_decay": True, "full_rank_gate": True, "gate_bias": False},
}


@pytest.mark.parametrize(("bounded", "most"), [(False, 1), (True, 2)])
@pytest.mark.parametrize("ranks", FULL_RANKS)
def test_kda(oracle: Oracle, length: int, ranks: str, bounded: bool, most: int, backend: str):
    naive = oracle("fla.ops.kda.naive").naive_recurrent_kda
    options = FULL_RANKS[ranks] | ({"decay": BoundedChannelDecay} if bounded else {})
    ours = shaken(KDA(SITE, **SIZES, **options, allow_neg_eigval=most == 2))

    def formula(x: Tensor, w: Weights) -> Tensor:
        q, k, v = streams(x, w)
        f, gate = low_rank(x, w)
        g = channel_decay(f, w, H, -5.0 if bounded else None)
        o, _ = naive(unit(q), unit(k), v, g, most * linear(x, w, "in_proj.b")[0].sigmoid())
        return output(o, gate, w)

    compare_with_formula(ours, formula, torch.randn(2, length, 32), backend, TOLERANCE)


def curvature_gates(x: Tensor, w: Weights) -> dict[str, Tensor]:
    """The arguments of flash-linear-attention's naive functions for a preconditioner."""
    a, b = linear(x, w, "in_proj.curvature_a", "in_proj.curvature_b")
    rate, bias = w["preconditioner.decay.A_log"].exp(), w["preconditioner.decay.dt_bias"]
    return {"g_atk": -rate * F.softplus(a + bias), "beta_atk": b.sigmoid(), "log_atk_scale": w["preconditioner.centre"]}


def spread(mixer: LinearMixer) -> LinearMixer:
    """A preconditioner whose M is neither near its limits nor the same for all heads: unit keys of 8 channels."""
    assert mixer.preconditioner is not None
    torch.nn.init.uniform_(mixer.preconditioner.centre, -3, -1)
    return mixer


@pytest.mark.parametrize(("bounded", "most"), [(False, 1), (True, 2)])
def test_preconditioned_kda(oracle: Oracle, length: int, bounded: bool, most: int, backend: str):
    naive = oracle("fla.ops.precond_kda.naive").naive_recurrent_precond_kda
    options = {"decay": BoundedChannelDecay} if bounded else {}
    sizes = {**SIZES, "num_key_heads": H}  # theirs has a preconditioner for each value head
    ours = KDA(SITE, **sizes, **options, allow_neg_eigval=most == 2, preconditioner=Preconditioner)
    ours = spread(shaken(ours))

    def formula(x: Tensor, w: Weights) -> Tensor:
        q, k, v = streams(x, w, key_heads=H)
        f, gate = low_rank(x, w)
        g = channel_decay(f, w, H, -5.0 if bounded else None)
        beta = most * linear(x, w, "in_proj.b")[0].sigmoid()
        o, _, _ = naive(unit(q), unit(k), v, g, beta=beta, **curvature_gates(x, w))
        return output(o, gate, w)

    compare_with_formula(ours, formula, torch.randn(2, length, 32), backend, TOLERANCE)


def test_preconditioned_gated_deltanet(oracle: Oracle, length: int, backend: str):
    naive = oracle("fla.ops.precond_gated_delta_rule.naive").naive_recurrent_precond_gated_delta_rule
    ours = spread(shaken(GatedDeltaNet(SITE, **SIZES, preconditioner=partial(Preconditioner, limit=2.0))))
    with torch.no_grad():  # the naive function brings q and k to length one itself, without the kernels' eps of 1e-6
        for weight in ours.in_proj.weight.split([*ours.in_proj.widths.values()])[:2]:
            weight.mul_(30)

    def formula(x: Tensor, w: Weights) -> Tensor:
        q, k, v = streams(x, w)
        beta = linear(x, w, "in_proj.b")[0].sigmoid()
        o, _, _ = naive(q, k, v, g=head_decay(x, w), beta=beta, x=2.0, **curvature_gates(x, w))
        return output(o, F.silu(*linear(x, w, "in_proj.g")), w, "o_norm.weight")

    compare_with_formula(ours, formula, torch.randn(2, length, 32), backend, TOLERANCE)


# Kimi Linear, GLM-5.3-Flash and Ling 3.0: the beginning and end of their layer's name, and their decays
OF_TRANSFORMERS = {
    "kimi_linear": ("KimiLinear", "DeltaAttention", ChannelDecay),
    "glm5_next": ("Glm5NextText", "LinearAttention", BoundedChannelDecay),
    "bailing_hybrid": ("BailingHybrid", "DeltaAttention", BoundedChannelDecay),
}


@pytest.mark.parametrize("family", OF_TRANSFORMERS)
def test_kda_of_transformers(oracle: Oracle, monkeypatch: pytest.MonkeyPatch, family: str, length: int, backend: str):
    theirs = oracle(f"transformers.models.{family}.modeling_{family}")
    # wherever flash-linear-attention is installed, it would call its kernels: take the loop over time behind them
    plain = inspect.unwrap(theirs.recurrent_kimi_delta_attention)
    monkeypatch.setattr(theirs, "chunk_kimi_delta_attention", plain)
    name, kind, decay = OF_TRANSFORMERS[family]
    full_rank = family == "bailing_hybrid"
    sizes = dict(num_attention_heads=H, head_dim=K) if full_rank else dict(linear_num_heads=H, linear_head_dim=K)
    layers = dict(num_hidden_layers=1, layer_types=["linear_attention"], mlp_layer_types=["dense"])
    config = getattr(theirs, f"{name}Config")(hidden_size=32, rms_norm_eps=1e-5, **sizes, **layers)
    layer = getattr(theirs, f"{name}{kind}")(config, 0)
    torch.nn.init.zeros_(layer.forget_gate.A_log)
    torch.nn.init.zeros_(layer.forget_gate.dt_bias)
    shaken(layer)
    ours = KDA(SITE, decay=decay, full_rank_decay=full_rank, full_rank_gate=full_rank, gate_bias=False)

    names = {"f_a_proj": "in_proj.f", "f_b_proj": "decay_up", "g_a_proj": "in_proj.g", "g_b_proj": "g_up"}
    if full_rank:
        names = {"f_proj": "in_proj.f", "g_proj": "in_proj.g"}
    names |= {"o_norm": "o_norm.norm", "o_proj": "o_proj", "b_proj": "in_proj.b"}
    names |= {f"{x}_proj": f"in_proj.{x}" for x in "qkv"}
    places = {f"{'forget_gate.' * t.startswith('f_')}{t}.weight": f"{o}.weight" for t, o in names.items()}
    weights = dict(layer.named_parameters())
    state = {name: weights[place] for place, name in places.items()}
    state |= {f"{x}_features.weight": w for x, w in zip("qkv", layer.conv1d.weight.chunk(3), strict=True)}
    state |= {"decay.A_log": layer.forget_gate.A_log.flatten(), "decay.dt_bias": layer.forget_gate.dt_bias}
    with kernels.backend(backend):
        compare(ours, layer, state, torch.randn(2, length, 32), tolerance=TOLERANCE)


@pytest.mark.parametrize("most", [1, 2])
def test_gated_deltanet2(oracle: Oracle, length: int, most: int, backend: str):
    naive = oracle("fla.ops.gdn2.naive").naive_recurrent_gdn2
    ours = shaken(GatedDeltaNet2(SITE, **SIZES, allow_neg_eigval=most == 2))

    def formula(x: Tensor, w: Weights) -> Tensor:
        q, k, v = streams(x, w)
        f, gate = low_rank(x, w)
        b, write = linear(x, w, "in_proj.b", "in_proj.w")
        b, write = most * b.sigmoid().unflatten(-1, (G, -1)), write.sigmoid().unflatten(-1, (H, -1))
        # of value heads: it has no groups
        q, k, g, b = (s.repeat_interleave(H // G, 2) for s in (unit(q), unit(k), channel_decay(f, w, G), b))
        return output(naive(q, k, v, g, b, write)[0], gate, w)

    compare_with_formula(ours, formula, torch.randn(2, length, 32), backend, TOLERANCE)


@pytest.mark.parametrize(("steps", "most"), [(1, 1), (2, 2), (3, 2)])
def test_gated_deltaproduct(oracle: Oracle, length: int, steps: int, most: int, backend: str):
    naive = oracle("fla.ops.gated_delta_product.naive").naive_recurrent_gated_delta_product
    ours = shaken(GatedDeltaProduct(SITE, **SIZES, num_steps=steps, allow_neg_eigval=most == 2))

    def formula(x: Tensor, w: Weights) -> Tensor:
        q, k, v = streams(x, w, steps=steps)
        k, v, beta = (
            s.unflatten(2, (steps, -1)).flatten(1, 2)
            for s in (unit(k), v, most * linear(x, w, "in_proj.b")[0].sigmoid())
        )
        q, k = (s.repeat_interleave(H // G, 2) for s in (unit(q), k))
        o, _ = naive(q, k, v, head_decay(x, w), beta, K**-0.5, num_householder=steps)
        return output(o, F.silu(*linear(x, w, "in_proj.g")), w, "o_norm.weight")

    compare_with_formula(ours, formula, torch.randn(2, length, 32), backend, TOLERANCE)


@pytest.mark.parametrize("unit_feedback", [False, True])
@pytest.mark.parametrize("paper", [False, True])
def test_comba(oracle: Oracle, paper: bool, length: int, unit_feedback: bool, backend: str):
    chunks = oracle("fla.ops.comba.naive").naive_chunk_comba
    # queries that resemble their keys: the norm would blow up the rounding of a first q·k that is nearly zero
    ours = shaken(Comba(SITE, **SIZES, unit_feedback=unit_feedback))
    torch.nn.init.constant_(ours.D, -1)

    def formula(x: Tensor, w: Weights) -> Tensor:
        q, k, v = streams(x, w)
        p = w["feedback"].sigmoid()[:, None] * k
        q, k = unit(q - w["D"][:, None] * p), unit(k)
        p = k if unit_feedback else w["feedback"].sigmoid()[:, None] * k
        q, k, p = (s.repeat_interleave(H // G, 2) for s in (q, k, p))
        beta, log_decay = linear(x, w, "in_proj.b")[0].sigmoid(), head_decay(x, w)
        gate = linear(x, w, "in_proj.g")[0].sigmoid()
        if not paper:
            return output(chunks(q, k, v, p, log_decay, beta)[0], gate, w)
        decay = log_decay.exp()
        S, rows = x.new_zeros(len(x), H, K, V), []
        for t in range(length):
            error = v[:, t] - (p[:, t, :, :, None] * S).sum(2)  # the state before it decays
            written = (beta[:, t, :, None] * k[:, t])[..., None] * error[:, :, None]
            S = decay[:, t, :, None, None] * S + written
            rows.append(K**-0.5 * (q[:, t, :, :, None] * S).sum(2))
        return output(torch.stack(rows, 1), gate, w)

    compare_with_formula(ours, formula, torch.randn(2, length, 32), backend, TOLERANCE)


def test_rwkv7(oracle: Oracle, length: int, backend: str):
    naive = oracle("fla.ops.generalized_delta_rule.dplr.naive").dplr_recurrence
    both = shaken(TwoLayers(SITE, lower=RWKV7_SMALL, upper=RWKV7_SMALL))

    def layer(x: Tensor, w: Weights, first: Tensor | None) -> tuple[Tensor, Tensor]:
        def low_rank(y: Tensor, name: str) -> Tensor:
            return F.linear(F.linear(y, w[f"{name}.down.weight"]), w[f"{name}.up.weight"])

        before = F.pad(x, (0, 0, 1, 0))[:, :-1]
        r, d, k, v, a, g = (torch.lerp(x, before, share) for share in w["mix"])
        r, k, v = (F.linear(y, w[f"{name}_proj.weight"]) for y, name in ((r, "r"), (k, "k"), (v, "v")))
        decay = F.linear(F.linear(d, w["decay.down.weight"]).tanh(), w["decay.up.weight"]) + w["decay_bias"]
        decay = -(-F.softplus(-decay) - 0.5).exp()  # as the author writes it
        if first is not None:
            mixed = torch.lerp(x, before, w["mix"][3])
            v = v + (first - v) * (low_rank(mixed, "value") + w["value_bias"]).sigmoid()
        a = (low_rank(a, "rate") + w["rate_bias"]).sigmoid()
        g = F.linear(F.linear(g, w["g.down.weight"]).sigmoid(), w["g.up.weight"])
        direction, k = F.normalize((k * w["k_k"]).unflatten(-1, (4, 8)), dim=-1), k * (1 + (a - 1) * w["k_a"])
        heads = [y.unflatten(-1, (4, 8)) for y in (r, k, v, a, decay)]
        streams = (*heads[:3], -direction, direction * heads[3], heads[4])
        o, _ = naive(*(y.transpose(1, 2).float() for y in streams))
        o = 8**0.5 * o.transpose(1, 2).double()  # it divides queries by the root of their size
        norm = F.group_norm(
            o.flatten(0, 1).flatten(1), 4, w["o_norm.weight"].flatten(), w["o_norm.bias"].flatten(), 8e-5
        )
        own = (heads[0] * heads[1] * w["r_k"].view(4, 8)).sum(-1, keepdim=True) * heads[2]
        return F.linear((norm.view(x.shape) + own.flatten(2)) * g, w["o_proj.weight"]), v if first is None else first

    def formula(x: Tensor, w: Weights) -> Tensor:
        lower, upper = ({name[6:]: p for name, p in w.items() if name.startswith(part)} for part in ("lower", "upper"))
        y, first = layer(x, lower, None)
        return layer(x + y, upper, first)[0]

    compare_with_formula(both, formula, torch.randn(2, length, 32), backend, TOLERANCE)
