"""Elementwise functions whose results do not depend on where in a tensor a number lies, in deterministic mode.

On a CPU, PyTorch evaluates most of a tensor in vectors and the rest number by number, some functions with another last
digit. In that mode they are made of functions that have the same bits either way: exp, expm1, log1p and log σ.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .deterministic import is_deterministic


def _exact(x: Tensor) -> bool:
    """Return whether PyTorch's function would depend on the place of a number."""
    return x.is_cpu and is_deterministic()


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def sigmoid(x: Tensor) -> Tensor:
    """σ(x)."""
    return F.logsigmoid(_wide(x)).exp().to(x.dtype) if _exact(x) else x.sigmoid()


def silu(x: Tensor) -> Tensor:
    """x σ(x)."""
    return (_wide(x) * F.logsigmoid(_wide(x)).exp()).to(x.dtype) if _exact(x) else F.silu(x)


def tanh(x: Tensor) -> Tensor:
    """tanh(x)."""
    if not _exact(x):
        return x.tanh()
    t = (-2 * _wide(x).abs()).expm1()
    return torch.copysign(-t / (2 + t), x).to(x.dtype)


def soft_cap(x: Tensor, cap: float | None) -> Tensor:
    """cap · tanh(x / cap), or x with a cap of None."""
    return x if cap is None else cap * tanh(x / cap)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp x)."""
    return -F.logsigmoid(-_wide(x)).to(x.dtype) if _exact(x) else F.softplus(x)


def elu(x: Tensor) -> Tensor:
    """x, and exp(x) − 1 below 0."""
    return torch.where(x > 0, x, _wide(x).clamp(max=0).expm1().to(x.dtype)) if _exact(x) else F.elu(x)


def exp2(x: Tensor) -> Tensor:
    """2^x."""
    return (x * math.log(2)).exp() if _exact(x) else x.exp2()


def rsqrt(x: Tensor) -> Tensor:
    """1 / √x."""
    return _wide(x).rsqrt().to(x.dtype) if _exact(x) else x.rsqrt()


def logaddexp(x: Tensor, y: Tensor) -> Tensor:
    """log(exp x + exp y)."""
    if not _exact(x):
        return torch.logaddexp(x, y)
    apart = torch.where(x == y, 0, x - y)  # also where both are infinite
    return torch.maximum(x, y) + (-apart.abs()).exp().log1p()
