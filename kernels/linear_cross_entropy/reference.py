"""The cross-entropy of a linear head by its definition, in at least fp32."""

import torch
from torch import Tensor

from ..core.recurrence import at_least_fp32


def forward(x: Tensor, weight: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """Sum of the losses."""
    counted = labels != ignore_index
    with torch.autocast(x.device.type, enabled=False):
        logits = at_least_fp32(x[counted]) @ at_least_fp32(weight).T
        return (logits.logsumexp(-1) - logits.gather(-1, labels[counted, None])[:, 0]).sum()


def token_losses(x: Tensor, weight: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Loss of each token, and whether its label is the likeliest."""
    counted = labels != ignore_index
    with torch.autocast(x.device.type, enabled=False):
        logits = at_least_fp32(x) @ at_least_fp32(weight).T
        losses = logits.logsumexp(-1) - logits.gather(-1, labels.where(counted, 0)[:, None])[:, 0]
        return losses.where(counted, 0), (logits.argmax(-1) == labels) & counted
