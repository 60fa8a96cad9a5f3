"""Preconditioned keys: β k ⊙ M, where M falls with the curvature of each key channel."""

import math

from torch import Tensor

from ..core.backend import Op
from ..core.recurrence import check_not_negative
from . import composition

OP = Op(
    "precondition",
    reference=composition.reference,
    torch=composition.forward,
    gpu="kernels.precondition.gpu.op:forward",
)


def precondition(k: Tensor, curvature: Tensor, beta: Tensor, centre: Tensor, *, limit: float) -> Tensor:
    """β k ⊙ M, where M = exp(−log(limit) · r / (1 + |r|)) and r = log(A + 1e-6) − centre (arXiv 2604.21100).

    Args:
        k: Keys [B,T,H,K].
        curvature: Curvature A of each key channel, ≥ 0, in the shape of k. Negative ones are refused on a CPU and
            undefined elsewhere.
        beta: Strengths β [B,T,H].
        centre: log A of channels whose M is 1 [H].
        limit: M lies between 1/limit and limit; above 1.

    Returns:
        Keys to write with, in the shape and dtype of k.

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """
    if k.dim() != 4 or not k.is_floating_point():
        raise ValueError(f"k: expected a floating [B,T,H,K], got {k.dtype} {tuple(k.shape)}")
    for name, x, shape in (
        ("curvature", curvature, k.shape),
        ("beta", beta, k.shape[:3]),
        ("centre", centre, k.shape[2:3]),
    ):
        if x.shape != shape:
            raise ValueError(f"{name}: expected shape {tuple(shape)}, got {tuple(x.shape)}")
    if not 1 < limit < math.inf:
        raise ValueError(f"limit: must be a finite number above 1, got {limit}")
    if k.shape[1] > 1:  # as for log decays, one token is not worth the time
        check_not_negative("curvature", curvature)
    return OP(k, k, curvature, beta, centre, limit)
