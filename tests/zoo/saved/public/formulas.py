"""What flash-linear-attention's models compute, written out token by token: its own code needs a GPU.

All functions take a prompt's activations x [T,hidden] and `w`, which gives the weight of a layer by its public name.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import rwkv7

Weight = Callable[[str], Tensor]


def logits(family: str, weights: Mapping[str, Tensor], config: Mapping[str, Any], tokens: Tensor) -> Tensor:
    """Tokens [T] → logits [T,vocab] of a model of flash-linear-attention."""
    if family == "rwkv7":
        return rwkv7.logits(rwkv7.by_the_author(weights), tokens, config["norm_eps"])
    eps, x = config["norm_eps"], weights["model.embeddings.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):

        def w(name: str, layer: int = layer, of: str = "") -> Tensor:
            return weights[f"model.layers.{layer}.{of}{name}"]

        h = rms(x, w("attn_norm.weight"), eps)
        attn = config.get("attn") or []
        full = next((s for s in (attn if isinstance(attn, list) else [attn]) if layer in s["layers"]), None)
        part = functools.partial(w, of="attn.")
        x = x + (MIXERS[family](h, part, config, layer, weights) if full is None else attention(h, part, full))
        h = rms(x, w("mlp_norm.weight"), eps)
        x = (
            x
            + (F.silu(h @ w("mlp.gate_proj.weight").T) * (h @ w("mlp.up_proj.weight").T)) @ w("mlp.down_proj.weight").T
        )
    head = weights["model.embeddings.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
    return rms(x, weights["model.norm.weight"], eps) @ head.T


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def stream(
    x: Tensor, w: Weight, name: str, config: Mapping[str, Any], heads: int, act: Callable[[Tensor], Tensor]
) -> Tensor:
    """A projection, its short convolution if there is one, and its activation: [T,heads,size]."""
    y = x @ w(f"{name}_proj.weight").T
    if config["use_short_conv"]:
        taps = w(f"{name}_conv1d.weight")
        y = F.conv1d(F.pad(y.T, (taps.shape[-1] - 1, 0)), taps, groups=len(taps)).T
    return act(y).unflatten(-1, (heads, -1))


def identity(x: Tensor) -> Tensor:
    return x


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None = None, written: Tensor | None = None
) -> Tensor:
    """S = diag(decay) S; S += k vᵀ, or by the delta rule β w (v − kᵀS)ᵀ, w = k by default; o = Sᵀ q / √K.

    All [T,H,…].
    """
    written = k if written is None else written
    S, outputs = q.new_zeros(q.shape[1], q.shape[2], v.shape[2]), []
    for t in range(len(q)):
        S = decay[t][..., None] * S
        new = v[t] if beta is None else beta[t][:, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], S))
        S = S + torch.einsum("hk,hv->hkv", written[t], new)
        outputs.append(torch.einsum("hk,hkv->hv", q[t], S) * q.shape[2] ** -0.5)
    return torch.stack(outputs)


def gla(x: Tensor, w: Weight, c: Mapping[str, Any], layer: int, weights: object) -> Tensor:
    H, act = c["num_heads"], F.silu if c["use_short_conv"] else identity
    q, k, v = (stream(x, w, name, c, H, act) for name in "qkv")
    raw = x @ w("gk_proj.0.weight").T @ w("gk_proj.1.weight").T + w("gk_proj.1.bias")
    o = recurrence(q, k, v, (F.logsigmoid(raw) / 16).exp().unflatten(-1, (H, -1)))
    return gated(x, o, w, c) @ w("o_proj.weight").T


def gated(x: Tensor, o: Tensor, w: Weight, c: Mapping[str, Any]) -> Tensor:
    """The norm of outputs [T,H,V], and their gate if there is one: [T,H·V]."""
    if not c["use_output_gate"]:
        return rms(o, w("g_norm.weight"), c["norm_eps"]).flatten(1)
    gate = (x @ w("g_proj.weight").T).view_as(o)
    return (rms(o, w("g_norm_swish_gate.weight"), c["norm_eps"]) * F.silu(gate)).flatten(1)


def rotated(x: Tensor, base: float) -> Tensor:
    """x [T,H,D] with rotary positions: the halves of each head are the pairs that turn."""
    half = x.shape[-1] // 2
    angle = torch.arange(len(x))[:, None, None] * base ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def attention(x: Tensor, w: Weight, c: Mapping[str, Any]) -> Tensor:
    """Softmax attention over `window_size` tokens with the token itself, or over all; `c` is of its layers."""
    size = x.shape[-1] // c["num_heads"]
    q, k, v = (
        (x @ w(f"{y}_proj.weight").T + (w(f"{y}_proj.bias") if c["qkv_bias"] else 0)).unflatten(-1, (-1, size))
        for y in "qkv"
    )
    q, k = rotated(q, c["rope_theta"]), rotated(k, c["rope_theta"])
    k, v = (y.repeat_interleave(c["num_heads"] // c["num_kv_heads"], 1) for y in (k, v))
    outputs = []
    for t in range(len(x)):
        seen = slice(max(0, t + 1 - (c["window_size"] or len(x))), t + 1)
        weights = (torch.einsum("hd,shd->hs", q[t], k[seen]) * size**-0.5).softmax(-1)
        outputs.append(torch.einsum("hs,shd->hd", weights, v[seen]))
    return torch.stack(outputs).flatten(1) @ w("o_proj.weight").T


def retnet(x: Tensor, w: Weight, c: Mapping[str, Any], layer: int, weights: object) -> Tensor:
    H, c = c["num_heads"], {**c, "use_short_conv": False}  # their model does not hand it on
    q, k, v = (stream(x, w, name, c, H, identity) for name in "qkv")
    q, k = rotated(q, 10000.0), rotated(k, 10000.0)
    decay = (1 - 2.0 ** (-5 - torch.arange(H)))[None, :, None].expand(len(x), -1, 1)
    return gated(x, recurrence(q, k, v, decay), w, c) @ w("o_proj.weight").T


def hgrn2(x: Tensor, w: Weight, c: Mapping[str, Any], layer: int, weights: Mapping[str, Tensor]) -> Tensor:
    H = c["hidden_size"] // c["expand_ratio"]
    q, f, i = (stream(x, w, n, c, H, act) for n, act in (("q", F.silu), ("f", identity), ("i", identity)))
    bound = torch.zeros(H, c["expand_ratio"])
    if c["use_lower_bound"]:
        bounds = weights["model.lower_bounds"].softmax(0)
        bound = (bounds.cumsum(0) - bounds[0])[layer].unflatten(0, (H, -1))
    decay = bound + (1 - bound) * f.sigmoid()
    o = recurrence(q, 1 - decay, i, decay).flatten(1)
    return rms(o, w("g_norm.weight"), 1e-5) @ w("o_proj.weight").T  # 1e-5 whatever the config says


def delta(x: Tensor, w: Weight, c: Mapping[str, Any], heads: int, decay: Tensor) -> Tensor:
    """The delta rule, with or without a decay [T,H] and an output gate."""
    q, k = (unit(stream(x, w, name, c, c["num_heads"], F.silu)) for name in "qk")
    q, k = (y.repeat_interleave(heads // c["num_heads"], 1) for y in (q, k))
    v = stream(x, w, "v", c, heads, F.silu)
    beta = (x @ w("b_proj.weight").T).sigmoid() * (2 if c["allow_neg_eigval"] else 1)
    o = rms(recurrence(q, k, v, decay[..., None], beta), w("o_norm.weight"), c["norm_eps"])
    if c["use_gate"]:
        o = o * F.silu(x @ w("g_proj.weight").T).view_as(o)
    return o.flatten(1) @ w("o_proj.weight").T


def delta_net(x: Tensor, w: Weight, c: Mapping[str, Any], layer: int, weights: object) -> Tensor:
    return delta(x, w, c, c["num_heads"], torch.ones(len(x), c["num_heads"]))


def gated_deltanet(x: Tensor, w: Weight, c: Mapping[str, Any], layer: int, weights: object) -> Tensor:
    dt = F.softplus(x @ w("a_proj.weight").T + w("dt_bias"))
    return delta(x, w, c, c["num_v_heads"] or c["num_heads"], (-w("A_log").exp() * dt).exp())


def head_decay(x: Tensor, w: Weight) -> Tensor:
    """The decays of heads [T,H]."""
    return (-w("A_log").exp() * F.softplus(x @ w("a_proj.weight").T + w("dt_bias"))).exp()


def sigmoid_gated(x: Tensor, o: Tensor, gate: Tensor, w: Weight, c: Mapping[str, Any]) -> Tensor:
    return (rms(o, w("o_norm.weight"), c["norm_eps"]) * gate.sigmoid()).flatten(1) @ w("o_proj.weight").T


def kda(x: Tensor, w: Weight, c: Mapping[str, Any], layer: int, weights: object) -> Tensor:
    H = c["num_v_heads"] or c["num_heads"]
    q, k = (unit(stream(x, w, name, c, c["num_heads"], F.silu)) for name in "qk")
    q, k = (y.repeat_interleave(H // c["num_heads"], 1) for y in (q, k))
    v = stream(x, w, "v", c, H, F.silu)
    raw = (x @ w("f_proj.0.weight").T @ w("f_proj.1.weight").T + w("dt_bias")).unflatten(-1, (H, -1))
    A = w("A_log").exp()[:, None]
    g = -A * F.softplus(raw) if c["lower_bound"] is None else c["lower_bound"] * (A * raw).sigmoid()
    beta = (x @ w("b_proj.weight").T).sigmoid() * (2 if c["allow_neg_eigval"] else 1)
    gate = x @ w("g_proj.0.weight").T @ w("g_proj.1.weight").T + w("g_proj.1.bias")
    return sigmoid_gated(x, recurrence(q, k, v, g.exp(), beta), gate.view_as(v), w, c)


def comba(x: Tensor, w: Weight, c: Mapping[str, Any], layer: int, weights: object) -> Tensor:
    """As the kernels do it: p has length one, and reads the state before it decays."""
    H = c["num_v_heads"] or c["num_heads"]
    q, k = (stream(x, w, name, c, c["num_heads"], F.silu) for name in "qk")
    q, k = unit(q - (w("D") * w("decay").sigmoid())[:, None] * k), unit(k)
    q, k = (y.repeat_interleave(H // c["num_heads"], 1) for y in (q, k))
    v, beta, decay = stream(x, w, "v", c, H, F.silu), (x @ w("b_proj.weight").T).sigmoid(), head_decay(x, w)
    S, outputs = q.new_zeros(H, q.shape[2], v.shape[2]), []
    for t in range(len(q)):
        new = beta[t][:, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], S))
        S = decay[t][:, None, None] * S + torch.einsum("hk,hv->hkv", k[t], new)
        outputs.append(torch.einsum("hk,hkv->hv", q[t], S) * q.shape[2] ** -0.5)
    o = torch.stack(outputs)
    if c["use_output_gate"]:
        return sigmoid_gated(x, o, (x @ w("g_proj.weight").T).view_as(v), w, c)
    return rms(o, w("o_norm.weight"), c["norm_eps"]).flatten(1) @ w("o_proj.weight").T


def gated_deltaproduct(x: Tensor, w: Weight, c: Mapping[str, Any], layer: int, weights: object) -> Tensor:
    H, n, T = c["num_heads"], c["num_householder"], len(x)
    q = unit(stream(x, w, "q", c, H, F.silu))
    k, v = (stream(x, w, name, c, n * H, F.silu).unflatten(1, (n, H)) for name in "kv")
    beta = (x @ w("b_proj.weight").T).sigmoid().unflatten(1, (n, H)) * (2 if c["allow_neg_eigval"] else 1)
    decay = torch.ones(T, n, H)
    if c["use_forget_gate"]:
        decay[:, 0] = head_decay(x, w)
    queries = torch.zeros_like(k)
    queries[:, -1] = q
    steps = [y.flatten(0, 1) for y in (queries, unit(k), v, decay[..., None], beta)]
    o = rms(recurrence(*steps).unflatten(0, (T, n))[:, -1], w("o_norm.weight"), c["norm_eps"])
    if c["use_output_gate"]:
        o = o * F.silu(x @ w("g_proj.weight").T).view_as(o)
    return o.flatten(1) @ w("o_proj.weight").T


MIXERS = {
    **{"gla": gla, "retnet": retnet, "hgrn2": hgrn2, "delta_net": delta_net, "gated_deltanet": gated_deltanet},
    **{"kda": kda, "comba": comba, "gated_deltaproduct": gated_deltaproduct},
}
