"""The decays in PyTorch, with gradients that need nothing but the arguments.

Autograd would save x in fp32 and several results of the same size.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.allocation import new
from ..core.autograd import Gradients, over_rows, register
from ..core.elementwise import logaddexp, sigmoid
from ..core.recurrence import at_least_fp32


def _biased(x: Tensor, bias: Tensor | None) -> Tensor:
    return at_least_fp32(x) if bias is None else at_least_fp32(x) + at_least_fp32(bias)


def log_forget(x: Tensor, odds: Tensor | None) -> Tensor:
    """log(σ(odds) + σ(−odds) σ(x)) of x in at least fp32, without underflow of any of the factors."""
    if odds is None:
        return F.logsigmoid(x)
    odds = at_least_fp32(odds)
    # not by 1 − lb, which may round to zero
    return logaddexp(F.logsigmoid(odds), F.logsigmoid(-odds) + F.logsigmoid(x))


class Arguments(NamedTuple):
    x: Tensor  # […,C]
    bias: Tensor | None  # [C]
    odds: Tensor | None  # [C]
    scale: float


def empty(args: Arguments) -> tuple[Tensor]:
    """Uninitialised results."""
    return (new(args.x, dtype=torch.promote_types(args.x.dtype, torch.float32)),)


def _compute(args: Arguments) -> tuple[Tensor]:
    x, bias, odds, scale = args
    return (log_forget(_biased(x, bias), odds).mul_(scale).contiguous(),)


def _differentiate(args: Arguments, needed: Any, dy: Tensor) -> Gradients:
    x, bias, odds, scale = args
    wide, dodds = _biased(x, bias), None
    if odds is None:
        dwide = sigmoid(-wide).mul_(dy)
    else:
        at = at_least_fp32(odds)
        log_f = log_forget(wide, odds)
        stays, opens, shut = F.logsigmoid(at), F.logsigmoid(-at), F.logsigmoid(-wide) - log_f
        dwide = (F.logsigmoid(wide) + (shut + opens)).exp_().mul_(dy)
        if needed.odds:
            dodds = (shut + (stays + opens)).exp_().mul_(dy)
            dodds = over_rows(dodds).mul_(scale).to(odds.dtype)
    dwide.mul_(scale)
    dbias = over_rows(dwide).to(bias.dtype) if bias is not None and needed.bias else None
    return {"x": dwide.to(x.dtype) if needed.x else None, "bias": dbias, "odds": dodds}


forward = register("forget_gate", _compute, _differentiate, empty)


def reference(x: Tensor, bias: Tensor | None, odds: Tensor | None, scale: float) -> Tensor:
    """The formula of the papers, in fp64, where σ of a strong gate is not 0."""
    wide = x.double() if bias is None else x.double() + bias
    forget = wide.sigmoid()
    if odds is not None:
        lower = odds.double().sigmoid()
        forget = lower + (1 - lower) * forget
    return (scale * torch.log(forget)).to(torch.promote_types(x.dtype, torch.float32))
