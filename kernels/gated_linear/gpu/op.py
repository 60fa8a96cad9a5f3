"""The gated product in Triton, one launch forward and one backward, around PyTorch's matrix products.

On Hopper, `hopper.py` fuses the launch of the backward pass with the product in front of it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...activation_gate.gpu import op as gates
from ...core.allocation import new
from ...core.autocast import autocast_dtype, without_autocast
from ...core.autograd import Gradients, register
from ...core.recompute import keeping
from ...gpu.paths import takes
from ...linear import tiles
from ...linear.gpu import op as few
from .. import composition
from .select import FUSED, Case


class Arguments(NamedTuple):
    gate_up: Tensor  # […,2·I]
    weight: Tensor  # [O,I]
    activation: str
    keep: bool  # whether the product is saved for the backward pass


def matmul(a: Tensor, b: Tensor, *, divide: bool = False) -> Tensor:
    """a [M,K] times b [K,N], which is cast to the dtype of a; `divide` as for `product`."""
    return tiles.product(a, b.to(a.dtype), new(a, len(a), b.shape[1]), "triton", divide=divide)


def _compute(args: Arguments) -> tuple[Tensor, Tensor]:
    """y […,O], and the product […,I], empty unless it is to be kept."""
    gate_up, weight, activation, keep = args
    (*outer, _), size = gate_up.shape, weight.shape[1]
    with without_autocast(gate_up.device):
        h = new(gate_up, *outer, size)
        gate, up = gate_up.chunk(2, -1)
        gates.compute(gates.Arguments(gate, up, activation, 1.0), h)
        y = matmul(h.view(-1, size), weight.T).view(*outer, len(weight))
        return y, h if keep else new(gate_up, 0)


def _empty(args: Arguments) -> tuple[Tensor, Tensor]:
    gate_up, (*outer, _), (O, I) = args.gate_up, args.gate_up.shape, args.weight.shape
    return new(gate_up, *outer, O), new(gate_up, *((*outer, I) if args.keep else (0,)))


def _through_product(args: Arguments, dy: Tensor, h: Tensor | None) -> Tensor:
    """Return the gradients of gate and up for those of y [M,O]; the gated product is written to h [M,I], if given."""
    gate_up, weight = args.gate_up, args.weight
    dgate_up, (O, size) = new(gate_up, *gate_up.shape), weight.shape
    case = Case((gate_up, dy), rows=len(dy), inner=O, size=size, backward=True)
    if takes(FUSED, case):
        from .hopper import fused_backward  # imported on first use: other GPUs do not need Gluon

        fused_backward(gate_up, dy, weight.to(dy.dtype), h, dgate_up, args.activation == "silu")
        return dgate_up
    (gate, up), (dgate, dup) = gate_up.chunk(2, -1), dgate_up.chunk(2, -1)
    gates.compute_gradients(gates.Arguments(gate, up, args.activation, 1.0), matmul(dy, weight), h, dup, dgate)
    return dgate_up


def differentiate(args: Arguments, needed: Any, dy: Tensor, h: Tensor) -> Gradients:
    """The gradients of `gated_linear`; h, the gated product, is ignored unless it was kept."""
    weight = args.weight
    dy = dy.reshape(-1, len(weight))
    with without_autocast(dy.device):
        recomputed = None if args.keep else new(args.gate_up, len(dy), weight.shape[1])
        dgate_up = _through_product(args, dy, recomputed) if needed.gate_up or not args.keep else None
        h = h.view(len(dy), weight.shape[1]) if recomputed is None else recomputed
        dweight = matmul(dy.T, h, divide=True).to(weight.dtype) if needed.weight else None
        return {"gate_up": dgate_up, "weight": dweight}


gated_linear = register("gated_linear", _compute, differentiate, _empty)


def forward(gate_up: Tensor, weight: Tensor, activation: str) -> Tensor:
    """[…,O]; see `gated_linear`."""
    if (dtype := autocast_dtype(gate_up.device)) is not None:
        gate_up = gate_up.to(dtype)
    keep = keeping() and torch.is_grad_enabled() and weight.requires_grad
    return gated_linear(gate_up.contiguous(), weight, activation, keep)


def product(x: Tensor, weight: Tensor, activation: str) -> Tensor:
    """The gated product of few rows, in the launch that computes its factors."""
    if not few.serves(x):
        return composition.product(x, weight, activation)
    return few.linear_few(x.contiguous(), weight.contiguous(), None, activation)
