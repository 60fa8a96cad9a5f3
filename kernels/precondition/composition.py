"""Preconditioned keys in PyTorch, with gradients that need nothing but the arguments.

Autograd would save six tensors of the size of k in fp32.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.allocation import new
from ..core.autograd import Gradients, register
from ..core.recurrence import at_least_fp32

EPS = 1e-6  # added to the curvature before its logarithm


class Arguments(NamedTuple):
    k: Tensor  # […,C]
    curvature: Tensor  # […,C]
    centre: Tensor  # [C]
    limit: float


def empty(args: Arguments) -> tuple[Tensor]:
    """Uninitialised results."""
    return (new(args.k),)


def _deviation(args: Arguments) -> Tensor:
    """log(A + 1e-6) − centre."""
    return (at_least_fp32(args.curvature) + EPS).log_().sub_(at_least_fp32(args.centre))


def _compute(args: Arguments) -> tuple[Tensor]:
    r = _deviation(args)
    factor = r.div_(r.abs().add_(1)).mul_(-math.log(args.limit)).exp_()
    return (factor.mul_(args.k).to(args.k.dtype).contiguous(),)


def _differentiate(args: Arguments, needed: Any, dy: Tensor) -> Gradients:
    k, curvature, centre, limit = args
    r = _deviation(args)
    shrunk = r.abs().add_(1).reciprocal_()
    factor = r.mul_(shrunk).mul_(-math.log(limit)).exp_().mul_(dy)
    dr = shrunk.square_().mul_(factor).mul_(k).mul_(-math.log(limit))
    dcentre = -dr.flatten(0, -2).sum(0).to(centre.dtype) if needed.centre else None
    dcurvature = dr.div_(at_least_fp32(curvature) + EPS).to(curvature.dtype) if needed.curvature else None
    return {"k": factor.to(k.dtype) if needed.k else None, "curvature": dcurvature, "centre": dcentre}


apply = register("precondition", _compute, _differentiate, empty)


def forward(k: Tensor, curvature: Tensor, centre: Tensor, limit: float) -> Tensor:
    """k ⊙ M in the shape of k […,C]."""
    return apply(k, curvature, centre, limit)[0]


def reference(k: Tensor, curvature: Tensor, centre: Tensor, limit: float) -> Tensor:
    """The formula of the paper."""
    r = torch.log(at_least_fp32(curvature) + EPS) - at_least_fp32(centre)
    return (k * torch.exp(-math.log(limit) * r / (1 + r.abs()))).to(k.dtype)
