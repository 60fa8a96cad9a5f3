"""Mamba-3 in the layout of the package mamba_ssm, whose own code needs a GPU: its formula, token by token."""

import json
import math
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import torch.nn.functional as F
from torch import Tensor, nn

_LAYER = {"layer": "Mamba3", "d_state": 16, "headdim": 16, "ngroups": 1, "rope_fraction": 0.5, "expand": 2}
_SIZES = {"d_model": 48, "n_layer": 3, "vocab_size": 97, "d_intermediate": 0, "ssm_cfg": _LAYER}
CASES: dict[str, dict[str, Any]] = {
    "mamba3": _SIZES,
    "mamba3, untied and grouped": {
        **_SIZES,
        "tie_embeddings": False,
        "pad_vocab_size_multiple": 1,
        "ssm_cfg": {**_LAYER, "ngroups": 3, "rope_fraction": 1.0, "d_state": 10, "chunk_size": 32},
    },
    "mamba3, LayerNorm and MLPs": {**_SIZES, "rms_norm": False, "d_intermediate": 100, "residual_in_fp32": False},
}


class Mixer(nn.Module):
    """One layer."""

    def __init__(self, size: int, c: dict[str, Any]):
        super().__init__()
        width, self.K, self.P, self.G = c["expand"] * size, c["d_state"], c["headdim"], c["ngroups"]
        self.H, self.pairs = width // self.P, int(self.K * c["rope_fraction"]) // 2
        self.sizes = [width, width, self.G * self.K, self.G * self.K, self.H, self.H, self.H, self.pairs]
        self.in_proj = nn.Linear(size, sum(self.sizes), bias=False)
        self.out_proj = nn.Linear(width, size, bias=False)
        self.B_norm, self.C_norm = nn.RMSNorm(self.K, eps=1e-5), nn.RMSNorm(self.K, eps=1e-5)
        self.B_bias, self.C_bias = (nn.Parameter(torch.empty(self.H, 1, self.K)) for _ in range(2))
        self.dt_bias, self.D = nn.Parameter(torch.empty(self.H)), nn.Parameter(torch.empty(self.H))

    def forward(self, u: Tensor) -> Tensor:
        z, x, B, C, dt, A, trap, angles = self.in_proj(u).split(self.sizes, -1)
        z, x = (y.unflatten(-1, (self.H, self.P)) for y in (z, x))
        B, C = (
            norm(y.unflatten(-1, (self.G, self.K))).repeat_interleave(self.H // self.G, 2) + bias[:, 0]
            for y, norm, bias in ((B, self.B_norm, self.B_bias), (C, self.C_norm, self.C_bias))
        )
        dt, trap = F.softplus(dt + self.dt_bias), trap.sigmoid()
        alpha = (-torch.where(A > 0, 1 + A, 1 / (1 - A.clamp(max=0))).clamp(min=1e-4) * dt).exp()
        turns = (math.pi * angles.tanh()[:, :, None] * dt[..., None]).double().cumsum(1)
        B, C = turned(B, turns), turned(C, turns)
        S, before, outputs = torch.zeros(len(u), self.H, self.P, self.K), 0.0, []
        for t in range(u.shape[1]):
            now = x[:, t, :, :, None] * B[:, t, :, None]
            old, new = alpha[:, t] * dt[:, t] * (1 - trap[:, t]), dt[:, t] * trap[:, t]
            S = alpha[:, t, :, None, None] * S + old[..., None, None] * before + new[..., None, None] * now
            before = now
            outputs.append((S * C[:, t, :, None]).sum(-1))
        y = (torch.stack(outputs, 1) + self.D[:, None] * x) * F.silu(z)
        out: Tensor = self.out_proj(y.flatten(2))
        return out


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """x with its first pairs of neighbouring channels turned by angles."""
    count = 2 * angles.shape[-1]
    pairs = torch.view_as_complex(x[..., :count].double().unflatten(-1, (-1, 2)).contiguous())
    pairs = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2).to(x.dtype)
    return torch.cat([pairs, x[..., count:]], -1)


class Mlp(nn.Module):
    """The MLP of a layer; its inner size is rounded up to a multiple of 128."""

    def __init__(self, size: int, inner: int):
        super().__init__()
        inner = math.ceil(inner / 128) * 128
        self.fc1, self.fc2 = nn.Linear(size, 2 * inner, bias=False), nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y, gate = self.fc1(x).chunk(2, -1)
        out: Tensor = self.fc2(y * F.silu(gate))
        return out


class Model(nn.Module):
    """A model of random weights; `config` is the contents of its config.json."""

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        self.config, size, inner = config, config["d_model"], config["d_intermediate"]

        def norm() -> nn.Module:
            return (nn.RMSNorm if config.get("rms_norm", True) else nn.LayerNorm)(size, eps=1e-5)

        multiple = config.get("pad_vocab_size_multiple", 8)
        layers = [
            nn.ModuleDict(
                {"norm": norm(), "mixer": Mixer(size, config["ssm_cfg"])}
                | ({"norm2": norm(), "mlp": Mlp(size, inner)} if inner else {})
            )
            for _ in range(config["n_layer"])
        ]
        embedding = nn.Embedding(math.ceil(config["vocab_size"] / multiple) * multiple, size)
        self.backbone = nn.ModuleDict({"embedding": embedding, "layers": nn.ModuleList(layers), "norm_f": norm()})
        self.lm_head = nn.Linear(size, len(embedding.weight), bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.2)
            else:
                nn.init.uniform_(parameter, -0.5, 1.2)
        if config.get("tie_embeddings", True):
            self.lm_head.weight = embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [B,T] → logits [B,T,vocab]."""
        x = self.backbone["embedding"](tokens)
        for layer in self.backbone["layers"]:
            x = x + layer["mixer"](layer["norm"](x))
            x = x + layer["mlp"](layer["norm2"](x)) if "mlp" in layer else x
        logits: Tensor = self.lm_head(self.backbone["norm_f"](x))
        return logits

    def save_pretrained(self, folder: Path, max_shard_size: str = "5GB") -> None:
        """Save it as mamba_ssm does, but as safetensors."""
        folder.mkdir()
        weights = self.state_dict()
        if self.lm_head.weight is self.backbone["embedding"].weight:
            del weights["lm_head.weight"]
        huggingface_hub.save_torch_state_dict(weights, folder, max_shard_size=max_shard_size)
        (folder / "config.json").write_text(json.dumps(self.config))
