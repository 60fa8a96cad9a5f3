"""RWKV-7 as its author writes it, token by token, under his names; and flash-linear-attention's names for his."""

import re
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = Mapping[str, Tensor]
_PLACES = {"2.bias": 0, "0.weight": 1, "2.weight": 2}
_NAMES = {
    **{"model.embeddings": "emb", "lm_head": "head", "model.norm": "ln_out", "model.layers": "blocks"},
    **{"attn.r_proj": "att.receptance", "attn.k_proj": "att.key", "attn.v_proj": "att.value"},
    **{"attn.o_proj": "att.output", "attn.g_norm": "att.ln_x"},
    **{"pre_norm": "ln0", "attn_norm": "ln1", "ffn_norm": "ln2", "attn.": "att."},
}


def by_the_author(weights: Weights) -> dict[str, Tensor]:
    """Weights of flash-linear-attention's RWKV-7 under the names, and in the shapes, of the author's."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        for theirs, author in _NAMES.items():
            name = name.replace(theirs, author)
        if match := re.fullmatch(r"(.*)_lora\.lora\.(.*)", name):
            name = f"{match[1]}{_PLACES[match[2]]}"
            tensor = tensor.T if tensor.dim() == 2 else tensor
        renamed[name] = tensor[None, None] if re.search(r"\.(w0|a0|v0|k_k|k_a|x_k)$", name) else tensor
        renamed[name] = renamed[name].flatten(0, -3) if renamed[name].dim() > 3 else renamed[name]
    return renamed


def logits(z: Weights, tokens: Tensor, eps: float) -> Tensor:
    """Tokens [T] → logits [T,vocab]."""
    layers = 1 + max(int(name.split(".")[1]) for name in z if name.startswith("blocks."))
    H, N = z["blocks.0.att.r_k"].shape
    x, first = z["emb.weight"][tokens], torch.empty(0)

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], z[f"{name}.weight"], z[f"{name}.bias"], eps)

    if "blocks.0.ln0.weight" in z:
        x = norm(x, "blocks.0.ln0")
    for layer in range(layers):
        block, att = f"blocks.{layer}.", f"blocks.{layer}.att."
        h = norm(x, f"{block}ln1")
        change = F.pad(h, (0, 0, 1, 0))[:-1] - h
        r, w, k, v, a, g = (h + change * z[f"{att}x_{name}"].flatten() for name in "rwkvag")
        w0, a0 = z[f"{att}w0"].flatten(), z[f"{att}a0"].flatten()
        w = -F.softplus(-(w0 + (w @ z[f"{att}w1"]).tanh() @ z[f"{att}w2"])) - 0.5
        a = (a0 + a @ z[f"{att}a1"] @ z[f"{att}a2"]).sigmoid()
        g = (g @ z[f"{att}g1"]).sigmoid() @ z[f"{att}g2"]
        r, k = r @ z[f"{att}receptance.weight"].T, k @ z[f"{att}key.weight"].T
        values = v @ z[f"{att}value.weight"].T
        if layer:
            share = (z[f"{att}v0"].flatten() + v @ z[f"{att}v1"] @ z[f"{att}v2"]).sigmoid()
            values = values + (first - values) * share
        else:
            first = values
        kk = F.normalize((k * z[f"{att}k_k"].flatten()).view(-1, H, N), dim=-1)
        k = k * (1 + (a - 1) * z[f"{att}k_a"].flatten())
        r, w, k, v, a = (y.view(-1, H, N) for y in (r, w, k, values, a))
        S, outputs = torch.zeros(H, N, N), []  # the rows are values
        for t in range(len(tokens)):
            erased = torch.einsum("hvk,hk,hj->hvj", S, -kk[t], kk[t] * a[t])
            S = S * (-w[t].exp()).exp()[:, None] + erased + torch.einsum("hv,hk->hvk", v[t], k[t])
            outputs.append(torch.einsum("hvk,hk->hv", S, r[t]))
        o = torch.stack(outputs).flatten(1)
        o = F.group_norm(o, H, z[f"{att}ln_x.weight"], z[f"{att}ln_x.bias"], N * eps)
        o = o + ((r * k * z[f"{att}r_k"]).sum(-1, keepdim=True) * v).flatten(1)
        x = x + (o * g) @ z[f"{att}output.weight"].T
        h = norm(x, f"{block}ln2")
        h = h + (F.pad(h, (0, 0, 1, 0))[:-1] - h) * z[f"{block}ffn.x_k"].flatten()
        x = x + (h @ z[f"{block}ffn.key.weight"].T).relu().square() @ z[f"{block}ffn.value.weight"].T
    return norm(x, "ln_out") @ z.get("head.weight", z["emb.weight"]).T
