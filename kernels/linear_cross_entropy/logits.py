"""The cross-entropy of a linear head from its logits in PyTorch: of all tokens, in parts, and by definition."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.autocast import without_autocast
from ..core.elementwise import soft_cap
from ..core.recurrence import at_least_fp32
from ..linear.tiles import linear

LOGITS = 2**25  # in memory at a time: 1024 tokens at a vocabulary of 32,000


def row_losses(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """The losses [N] of logits [N,V]."""
    return F.cross_entropy(at_least_fp32(logits), labels, ignore_index=ignore_index, reduction="none")


def capped_logits(x: Tensor, weight: Tensor, cap: float | None) -> Tensor:
    """The logits x Wᵀ; with a cap, in at least fp32 and between −cap and cap."""
    logits = linear(x, weight)
    return logits if cap is None else soft_cap(at_least_fp32(logits), cap)


def forward(x: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, cap: float | None) -> Tensor:
    """Sum of the losses, from the logits of all tokens: the CPU path."""
    x = x.masked_fill((labels == ignore_index)[:, None], 0)  # nan there stays out of the gradient of the weight
    return row_losses(capped_logits(x, weight, cap), labels, ignore_index).sum()


def token_losses(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    ignore_index: int,
    cap: float | None,
    row_losses: Callable[[Tensor, Tensor, int], Tensor] = row_losses,
) -> tuple[Tensor, Tensor]:
    """Loss of each token [N], and whether its label is the likeliest [N]."""
    losses, correct = at_least_fp32(x.new_zeros(len(x))), torch.zeros_like(labels, dtype=torch.bool)
    rows = max(1, LOGITS // weight.shape[0])
    for first in range(0, len(x), rows):
        some = slice(first, first + rows)
        logits = capped_logits(x[some], weight, cap)
        correct[some] = (logits.argmax(-1) == labels[some]) & (labels[some] != ignore_index)
        losses[some] = row_losses(logits, labels[some], ignore_index)
    return losses, correct


def _counted(labels: Tensor, size: int, ignore_index: int) -> Tensor:
    """Return which tokens have a loss; raise an IndexError for a label outside a vocabulary of `size` on a CPU."""
    counted = labels != ignore_index
    if labels.is_cpu and bool((counted & ((labels < 0) | (labels >= size))).any()):
        raise IndexError(f"labels: one is outside the vocabulary of {size} entries")
    return counted


def reference(x: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, cap: float | None) -> Tensor:
    """Sum of the losses, in at least fp32."""
    counted = _counted(labels, len(weight), ignore_index)
    with without_autocast(x.device):
        logits = soft_cap(at_least_fp32(x[counted]) @ at_least_fp32(weight).T, cap)
        return (logits.logsumexp(-1) - logits.gather(-1, labels[counted, None])[:, 0]).sum()


def reference_token_losses(
    x: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, cap: float | None
) -> tuple[Tensor, Tensor]:
    """As `token_losses`, in at least fp32."""
    counted = _counted(labels, len(weight), ignore_index)
    with without_autocast(x.device):
        logits = soft_cap(at_least_fp32(x) @ at_least_fp32(weight).T, cap)
        losses = logits.logsumexp(-1) - logits.gather(-1, labels.where(counted, 0)[:, None])[:, 0]
        return losses.where(counted, 0), (logits.argmax(-1) == labels) & counted
