"""The cross-entropy of a linear head from the logits of all tokens: the CPU path."""

import torch.nn.functional as F
from torch import Tensor

from ..core.recurrence import at_least_fp32


def forward(x: Tensor, weight: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """Sum of the losses."""
    logits = at_least_fp32(F.linear(x, weight))
    return F.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="none").sum()
