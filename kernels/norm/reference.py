"""Root-mean-square normalisation by its formula, in at least fp32."""

import torch
from torch import Tensor

from ..core.recurrence import at_least_fp32


def forward(
    x: Tensor, gate: Tensor | None, weight: Tensor | None, eps: float, gate_first: bool, dtype: torch.dtype
) -> Tensor:
    """The norm in the shape of x; see `gated_rms_norm`."""
    y, opened = at_least_fp32(x), None if gate is None else at_least_fp32(gate) * at_least_fp32(gate).sigmoid()
    if opened is not None and gate_first:
        y = y * opened
    y = y / (y.square().mean(-1, keepdim=True) + eps).sqrt()
    if weight is not None:
        y = y * at_least_fp32(weight)
    if opened is not None and not gate_first:
        y = y * opened
    return y.to(dtype)
