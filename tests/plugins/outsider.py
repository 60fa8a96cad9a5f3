"""A mixer by someone else: nothing in the project knows this file, it is named by its dotted path."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels import at_least_fp32
from mixers import FeatureMap, Features, LinearMixer, Projection, RMSNorm, Site, Streams, split_heads


class Learned(FeatureMap):
    """relu(x W), one W per head."""

    def __init__(self, heads: int, size: int):
        super().__init__(heads, size)
        self.weight = nn.Parameter(torch.empty(heads, size, size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.size**-0.5)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return torch.einsum("bthk,hkn->bthn", x, self.weight).relu()


class Outsider(LinearMixer):
    """S_t = f_t S_{t−1} + φ(k_t) v_tᵀ with one forget gate f_t per head."""

    def __init__(self, site: Site, *, num_heads: int | None = None):
        num_heads, size = site.heads(num_heads)
        phi = Features(map=Learned)
        super().__init__(site, num_heads=num_heads, key_size=size, value_size=size, q=phi, k=phi)
        widths = {"q": num_heads * size, "k": num_heads * size, "v": num_heads * size, "f": self.gate_heads}
        self.in_proj, self.norm = Projection(site.hidden_size, widths), RMSNorm(size)
        self.out_proj = nn.Linear(num_heads * size, site.hidden_size, bias=False)

    def project(self, x: Tensor) -> Streams:
        q, k, v, f = self.in_proj(x)
        return Streams(*(split_heads(s, self.num_heads) for s in (q, k, v)), f)

    def gates(self, s: Streams) -> Streams:
        return s.replace(log_decay=F.logsigmoid(at_least_fp32(s.log_decay)))

    def readout(self, o: Tensor, s: Streams) -> Tensor:
        return self.out_proj(self.norm(o).flatten(2))
