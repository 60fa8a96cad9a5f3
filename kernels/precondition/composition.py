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
    k: Tensor  # [B,T,H,K]
    curvature: Tensor  # [B,T,H,K]
    beta: Tensor  # [B,T,H]
    centre: Tensor  # [H]
    limit: float


def empty(args: Arguments) -> tuple[Tensor]:
    """Uninitialised results."""
    return (new(args.k),)


def _deviation(args: Arguments) -> Tensor:
    """log(A + 1e-6) − centre."""
    return (at_least_fp32(args.curvature) + EPS).log_().sub_(at_least_fp32(args.centre)[:, None])


def _compute(args: Arguments) -> tuple[Tensor]:
    r = _deviation(args)
    factor = r.div_(r.abs().add_(1)).mul_(-math.log(args.limit)).exp_()
    return (factor.mul_(args.k).mul_(args.beta[..., None]).to(args.k.dtype).contiguous(),)


def _differentiate(args: Arguments, needed: Any, dy: Tensor) -> Gradients:
    k, curvature, beta, centre, limit = args
    r = _deviation(args)
    shrunk = r.abs().add_(1).reciprocal_()
    of_product = r.mul_(shrunk).mul_(-math.log(limit)).exp_().mul_(dy)  # gradient of β k
    dbeta = (of_product * k).sum(-1).to(beta.dtype) if needed.beta else None
    dk = of_product.mul_(beta[..., None])
    dr = shrunk.square_().mul_(dk).mul_(k).mul_(-math.log(limit))
    dcentre = -dr.sum((0, 1, 3)).to(centre.dtype) if needed.centre else None
    dcurvature = dr.div_(at_least_fp32(curvature) + EPS).to(curvature.dtype) if needed.curvature else None
    return {"k": dk.to(k.dtype) if needed.k else None, "curvature": dcurvature, "beta": dbeta, "centre": dcentre}


forward = register("precondition", _compute, _differentiate, empty)


def reference(k: Tensor, curvature: Tensor, beta: Tensor, centre: Tensor, limit: float) -> Tensor:
    """The formula of the paper."""
    r = torch.log(at_least_fp32(curvature) + EPS) - at_least_fp32(centre)[:, None]
    factor = torch.exp(-math.log(limit) * r / (1 + r.abs()))
    return (beta[..., None] * k * factor).to(k.dtype)
