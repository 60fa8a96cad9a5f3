"""A gated MLP as one op, for `hopper.py`: its first product and the gated product are one launch."""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ...core.allocation import new
from ...core.autograd import Gradients, register
from ...core.recompute import keeping
from ...gpu.paths import takes
from ...linear import fp8
from ..mlp import in_halves
from . import op
from .select import FUSED, ROWS_FORWARD, Case


class Arguments(NamedTuple):
    x: Tensor  # […,D]
    gate_up: Tensor  # weights of gate and up [2·I,D]
    down: Tensor  # [O,I]
    activation: str
    keep: bool  # whether the product is saved for the backward pass
    frozen: bool  # whether gate_up gets no gradient, for which x would be saved


def _second(args: Arguments, gate_up: Tensor) -> op.Arguments:
    """The arguments of the second half."""
    return op.Arguments(gate_up, args.down, args.activation, args.keep, "")


def _compute(args: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """y […,O], gate and up […,2·I], and their product […,I], empty unless it is to be kept."""
    from .hopper import multiply  # the interpreter does without Gluon

    x, weight, down, activation, keep, _ = args
    (*outer, D), (O, I) = x.shape, down.shape
    gate_up, h = new(x, *outer, 2 * I), new(x, *outer, I)
    multiply(x.reshape(-1, D), weight, gate_up.view(-1, 2 * I), h.view(-1, I), activation == "silu")
    y = op.matmul(_second(args, gate_up), h.view(-1, I), down.T).view(*outer, O)
    return y, gate_up, h if keep else new(x, 0)


def _empty(args: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    x, (*outer, _), (O, I) = args.x, args.x.shape, args.down.shape
    return new(x, *outer, O), new(x, *outer, 2 * I), new(x, *((*outer, I) if args.keep else (0,)))


def _differentiate(args: Arguments, needed: Any, dy: Tensor, gate_up: Tensor, h: Tensor) -> Gradients:
    x, weight, second = args.x, args.gate_up, _second(args, gate_up)
    gradients = op.differentiate(second, second._replace(weight=needed.down), dy, h)
    dgate_up = gradients["gate_up"]
    assert dgate_up is not None
    dgate_up = dgate_up.view(-1, len(weight))
    with op.as_given(x.device.type):
        return {
            "x": op.matmul(second, dgate_up, weight).view(x.shape) if needed.x else None,
            "gate_up": op.matmul(second, dgate_up.T, x.reshape(-1, x.shape[-1])) if needed.gate_up else None,
            "down": gradients["weight"],
        }


gated_mlp = register("gated_mlp", _compute, _differentiate, _empty, unread=lambda args: ("x",) if args.frozen else ())


def forward(x: Tensor, gate_up: Tensor, down: Tensor, activation: Literal["identity", "silu"]) -> Tensor:
    """y […,O]; see `kernels.gated_mlp`."""
    (O, I), D = down.shape, x.shape[-1]
    case = Case((x, gate_up, down), rows=x.numel() // max(D, 1), inner=D, size=I, tile=ROWS_FORWARD)
    plain = not torch.is_autocast_enabled(x.device.type) and not fp8.in_fp8(D, 2 * I) and not fp8.in_fp8(I, O)
    if not (plain and takes(FUSED, case)):
        return in_halves(x, gate_up, down, activation)
    keep = keeping() and torch.is_grad_enabled() and down.requires_grad
    y: Tensor = gated_mlp(x, gate_up, down, activation, keep, not gate_up.requires_grad)
    return y
