"""Preconditioned keys: k ⊙ M, where M falls with the curvature of each key channel."""

from torch import Tensor

from ..core.backend import Op
from . import composition

OP = Op(
    "precondition",
    reference=composition.reference,
    torch=composition.forward,
    gpu="kernels.precondition.gpu.op:forward",
)


def precondition(k: Tensor, curvature: Tensor, centre: Tensor, *, limit: float) -> Tensor:
    """k ⊙ M, where M = exp(−log(limit) · r / (1 + |r|)) and r = log(A + 1e-6) − centre (arXiv 2604.21100).

    Args:
        k: Keys [B,T,G,K].
        curvature: Curvature A of each key channel, ≥ 0, in the shape of k.
        centre: log A of channels whose M is 1 [G].
        limit: M lies between 1/limit and limit; above 1.

    Returns:
        Keys in the shape and dtype of k.

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """
    if k.dim() != 4:
        raise ValueError(f"k: expected [B,T,G,K], got shape {tuple(k.shape)}")
    if curvature.shape != k.shape:
        raise ValueError(f"curvature: expected the shape of k, {tuple(k.shape)}, got {tuple(curvature.shape)}")
    if centre.shape != k.shape[2:3]:
        raise ValueError(f"centre: expected [{k.shape[2]}], got shape {tuple(centre.shape)}")
    if not limit > 1:
        raise ValueError(f"limit: must be above 1, got {limit}")
    centres = centre[:, None].expand(k.shape[2:]).flatten()
    return OP(k, k.flatten(2), curvature.flatten(2), centres, limit).view(k.shape)
