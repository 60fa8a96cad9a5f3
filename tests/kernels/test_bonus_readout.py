"""The readout of RWKV-7: by the formula, and in Triton."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import bonus_readout

from .op_contract import DEVICE, OpContract, Tensors


class TestBonusReadout(OpContract):
    op = "bonus_readout"
    sizes = ((1, 1, 1, 1, 1, 1), (2, 5, 2, 1, 8, 8), (1, 7, 3, 2, 5, 11), (2, 70, 2, 1, 64, 64))
    some_sizes = (2, 9, 2, 1, 33, 16)
    formula_sizes = ((2, 3, 2, 2, 4, 5),)
    device_sizes = ((2, 4097, 16, 1, 64, 64),)
    settings = (1e-3,)
    low = ("o", "q", "k", "v", "gate", "y")
    fitting = (1, 2, 2, 1, 4, 4)
    misfits = (
        (
            {"q": torch.zeros(1, 2, 3, 4)},
            r"q: expected \[…,H·E,K\] for o \[…,H,V\] of \(1, 2, 2, 4\), got shape \(1, 2, 3, 4\)",
        ),
        ({"k": torch.zeros(1, 2, 2, 5)}, r"k: expected \[1, 2, 2, 4\], got shape \(1, 2, 2, 5\)"),
        ({"gate": torch.zeros(1, 2, 2, 4)}, r"gate: expected \[1, 2, 8\], got shape \(1, 2, 2, 4\)"),
        ({"bias": torch.zeros(8)}, r"bias: expected \[2, 4\], got shape \(8,\)"),
        *(
            ({"o": o}, r"o: expected a floating \[…,H,V\] with at least one head, got torch")
            for o in (torch.zeros(1, 2, 0, 4), torch.zeros(1, 2, 2, 4, dtype=torch.int64))
        ),
    )
    refused = (((1, 1, 1, 1, 4097, 1), "which takes heads of at most 4096 channels"),)

    def inputs(self, B: int, T: int, H: int, E: int, K: int, V: int) -> Tensors:
        """Values that are columns of a projection, and other tensors without gaps."""
        tensors = {"o": 3 * torch.randn(B, T, H, V) + 1, "q": torch.randn(B, T, H * E, K)}
        tensors |= {
            "k": torch.randn(B, T, H * E, K),
            "v": torch.randn(B, T, H * V + 3)[..., 2:-1].unflatten(-1, (H, V)),
        }
        tensors |= {"gate": torch.rand(B, T, H * V), "r_k": torch.randn(H * E * K)}
        tensors |= {"weight": torch.randn(H, V), "bias": torch.randn(H, V)}
        return {name: x.to(DEVICE) for name, x in tensors.items()}

    def call(self, **tensors: Tensor) -> Tensor:
        return bonus_readout(**tensors, eps=1e-3)

    def formula(self, o, q, k, v, gate, r_k, weight, bias) -> Tensor:
        (B, T, H, V), E = o.shape, q.shape[2] // o.shape[2]
        norm = F.group_norm(o.flatten(0, 1).flatten(1), H, weight.flatten(), bias.flatten(), 1e-3)
        own = (q * k * r_k.view(H * E, -1)).sum(-1).view(B, T, H, E).sum(-1, keepdim=True) * v
        return (norm.view(B, T, H * V) + own.flatten(2)) * gate
