"""The formula of the papers, in PyTorch."""

import torch
from torch import Tensor

from ..core.recurrence import at_least_fp32


def forward(x: Tensor, bias: Tensor | None, odds: Tensor | None, scale: float) -> Tensor:
    """log_decay, in the shape of x […,C]."""
    x = at_least_fp32(x) if bias is None else at_least_fp32(x) + bias
    forget = x.sigmoid()
    if odds is not None:
        lower = at_least_fp32(odds).sigmoid()
        forget = lower + (1 - lower) * forget
    return scale * torch.log(forget)
