"""A gated MLP as one op, for `hopper.py`: its first product and the gated product are one launch."""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ...core.allocation import new
from ...core.autocast import autocast_dtype, without_autocast
from ...core.autograd import Gradients, register
from ...core.recompute import keeping
from ...gpu.paths import takes
from ..mlp import two_ops
from . import op
from .select import FUSED, Case


class Arguments(NamedTuple):
    x: Tensor  # […,D]
    gate_up: Tensor  # weights of gate and up [2·I,D]
    down: Tensor  # [O,I]
    activation: str
    keep: bool  # whether the product is saved for the backward pass
    frozen: bool  # whether gate_up gets no gradient, for which x would be saved
    differentiated: bool  # whether there is a backward pass, for which gate and up are saved


def _second(args: Arguments, gate_up: Tensor) -> op.Arguments:
    """The arguments of the second half."""
    return op.Arguments(gate_up, args.down, args.activation, args.keep)


def _compute(args: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """y […,O], gate and up […,2·I], and their product […,I]; the last two are empty unless they are saved."""
    from .hopper import fused_forward  # imported on first use: other GPUs do not need Gluon

    x, weight, down, activation, keep, _, differentiated = args
    (*outer, D), (O, I) = x.shape, down.shape
    gate_up, h = new(x, *((*outer, 2 * I) if differentiated else (0,))), new(x, *outer, I)
    saved = gate_up.view(-1, 2 * I) if differentiated else None
    # a flat x also has the strides that a descriptor requires if it is a single row
    fused_forward(x.reshape(-1, D), weight, saved, h.view(-1, I), activation == "silu")
    y = op.matmul(h.view(-1, I), down.T).view(*outer, O)
    return y, gate_up, h if keep else new(x, 0)


def _empty(args: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    x, (*outer, _), (O, I) = args.x, args.x.shape, args.down.shape
    gate_up = (*outer, 2 * I) if args.differentiated else (0,)
    return new(x, *outer, O), new(x, *gate_up), new(x, *((*outer, I) if args.keep else (0,)))


def _differentiate(args: Arguments, needed: Any, dy: Tensor, gate_up: Tensor, h: Tensor) -> Gradients:
    x, weight, second = args.x, args.gate_up, _second(args, gate_up)
    wanted: Any = second._replace(gate_up=needed.x or needed.gate_up, weight=needed.down)
    gradients = op.differentiate(second, wanted, dy, h)
    dgate_up = gradients["gate_up"]
    if dgate_up is None:
        return {"down": gradients["weight"]}
    dgate_up = dgate_up.view(-1, len(weight))
    with without_autocast(x.device):
        return {
            "x": op.matmul(dgate_up, weight).view(x.shape) if needed.x else None,
            "gate_up": op.matmul(dgate_up.T, x.reshape(-1, x.shape[-1])) if needed.gate_up else None,
            "down": gradients["weight"],
        }


gated_mlp = register("gated_mlp", _compute, _differentiate, _empty, unread=lambda args: ("x",) if args.frozen else ())


def forward(x: Tensor, gate_up: Tensor, down: Tensor, activation: Literal["identity", "silu"]) -> Tensor:
    """y […,O]; see `kernels.gated_mlp`."""
    I, D = down.shape[1], x.shape[-1]
    tensors, cast = (x, gate_up, down), autocast_dtype(x.device)
    case = Case(tensors, rows=x.numel() // max(D, 1), inner=D, size=I, backward=False, cast=cast)
    if not takes(FUSED, case):
        return two_ops(*tensors, activation)
    if cast is not None:
        x, gate_up, down = (each.to(cast) for each in tensors)
    differentiated = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
    keep = keeping() and differentiated and down.requires_grad
    y: Tensor = gated_mlp(x, gate_up, down, activation, keep, not gate_up.requires_grad, differentiated)
    return y
