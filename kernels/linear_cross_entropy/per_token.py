"""The loss of each token, and whether its label is the likeliest, a few thousand tokens at a time."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.recurrence import at_least_fp32

LOGITS = 2**25  # in memory at once: 1024 tokens at a vocabulary of 32,000

RowLosses = Callable[[Tensor, Tensor, int], Tensor]


def softmax_losses(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """The losses [N] of logits [N,V]."""
    return F.cross_entropy(at_least_fp32(logits), labels, ignore_index=ignore_index, reduction="none")


def forward(
    x: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, row_losses: RowLosses = softmax_losses
) -> tuple[Tensor, Tensor]:
    """Losses [N] and correct [N]."""
    losses, correct = at_least_fp32(x.new_zeros(len(x))), torch.zeros_like(labels, dtype=torch.bool)
    rows = max(1, LOGITS // weight.shape[0])
    for first in range(0, len(x), rows):
        some = slice(first, first + rows)
        logits = F.linear(x[some], weight)
        correct[some] = (logits.argmax(-1) == labels[some]) & (labels[some] != ignore_index)
        losses[some] = row_losses(logits, labels[some], ignore_index)
    return losses, correct
