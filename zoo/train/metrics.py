"""Evaluation metrics: the loss over all tokens and by position in the context, and loss and accuracy by task."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import Metric

from kernels import is_deterministic
from mixers import ContextParallel, positions
from zoo.data.batch import NO_LOSS
from zoo.lm.model import LanguageModel


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of each token in nats [B, T] fp32, from logits [B, T, vocab]; 0 where the label is -100."""
    losses = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=NO_LOSS, reduction="none")
    return losses.view_as(labels)


def total_loss(
    model: Any,
    tokens: Tensor,
    labels: Tensor,
    cu_seqlens: Tensor | None = None,
    context_parallel: ContextParallel | None = None,
) -> Tensor:
    """Sum of the cross entropies of all labels in nats, as in training: by the model's `loss` method if it has one.

    Args:
        model: tokens [B, T] → (logits [B, T, vocab], state).
        tokens: [B, T] int.
        labels: [B, T] int, already shifted; -100 has no loss.
        cu_seqlens: Boundaries [N+1] of documents packed into one row (B = 1).
        context_parallel: Which part of each sequence `tokens` and `labels` are; it is only passed on if it is not None,
            so a model without the argument works for whole sequences.

    Returns:
        A scalar in fp32.
    """
    shared = {} if context_parallel is None else {"context_parallel": context_parallel}
    if hasattr(model, "loss"):
        return model.loss(tokens, labels, cu_seqlens, **shared)
    return token_losses(model(tokens, cu_seqlens=cu_seqlens, **shared)[0], labels).sum()


def label_scores(
    model: Any,
    tokens: Tensor,
    labels: Tensor,
    cu_seqlens: Tensor | None = None,
    context_parallel: ContextParallel | None = None,
    *,
    every_token: bool = False,
) -> tuple[Tensor, Tensor]:
    """The loss of each label in nats [B, T] fp32, and whether it is the likeliest token [B, T].

    Both are 0 without a label. They are computed by the model's `token_losses` if it has that method; the arguments are
    those of `total_loss` and, for a `LanguageModel`, of that method.
    """
    if every_token and isinstance(model, LanguageModel):
        losses, correct, _ = model.token_losses(tokens, labels, cu_seqlens=cu_seqlens, every_token=True)
        return losses, correct
    shared = {} if context_parallel is None else {"context_parallel": context_parallel}
    if hasattr(model, "token_losses"):
        losses, correct, _ = model.token_losses(tokens, labels, cu_seqlens=cu_seqlens, **shared)
        return losses, correct
    logits = model(tokens, cu_seqlens=cu_seqlens, **shared)[0]
    return token_losses(logits, labels), logits.argmax(-1) == labels


def summable(losses: Tensor) -> Tensor:
    """Losses to be summed, in fp32; in deterministic mode in fp64, rounded so that sums do not depend on their order.

    Multiples of 2^-20 nats are summed without rounding, up to 2^33 nats.
    """
    return (losses.double() * 2**20).round() / 2**20 if is_deterministic() else losses.float()


class Means(Metric):
    """The mean of a number of each label, such as its loss: over all labels, and by group.

    Args:
        groups: Number of groups of labels.
        dtype: Of the sums.
    """

    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self, groups: int, dtype: torch.dtype = torch.float32) -> None:  # some accelerators have no fp64
        super().__init__()
        self.add_state("total", torch.zeros(groups, dtype=dtype), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros(groups, dtype=torch.int64), dist_reduce_fx="sum")

    def compute(self) -> tuple[Tensor, Tensor]:
        """The mean of all labels, and by group [groups], over all processes; nan where there was no label."""
        return self.total.sum() / self.count.sum(), self.total / self.count

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> nn.Module:
        # sums keep their dtype when the module around them is cast: bf16 would round away what is added
        return super()._apply(lambda x: x.to(fn(x).device), exclude_state)


class ContextLoss(Means):
    """Mean loss per token, and in equal buckets of the position in the context.

    If a model uses its context, its loss falls with the position.

    Args:
        context_length: Number of positions that the buckets divide; later ones count in the last bucket. None takes
            the length of the first batch, or of its longest document if documents are packed.
        buckets: Number of buckets.
    """

    def __init__(self, context_length: int | None = None, buckets: int = 8) -> None:
        super().__init__(buckets)
        self.context_length, self.buckets = context_length, buckets

    def update(
        self, losses: Tensor, labels: Tensor, cu_seqlens: Tensor | None, context_parallel: ContextParallel | None = None
    ) -> None:
        """Add a batch: `losses` [B, T] of `token_losses`, its `labels` [B, T] and document bounds [N+1] or None.

        With `context_parallel` they are a part of each sequence.
        """
        position, _ = positions(labels, None, cu_seqlens, context_parallel)
        if self.context_length is None:
            longest = None if context_parallel is None else context_parallel.longest
            self.context_length = int(position.max()) + 1 if longest is None else longest
        bucket = (position * self.buckets // self.context_length).clamp(max=self.buckets - 1).expand_as(labels)
        counted = (labels != NO_LOSS).flatten()[:, None]
        in_bucket = (bucket.flatten()[:, None] == torch.arange(self.buckets, device=bucket.device)) & counted
        # unlike index_add_, sums on a GPU are in a fixed order
        self.total = self.total + (in_bucket * summable(losses).flatten()[:, None]).sum(0)
        self.count += in_bucket.sum(0)


class TaskMeans(Means):
    """The mean of a number of each label, over all labels and by task."""

    def update(self, values: Tensor, labels: Tensor, task: int = 0) -> None:
        """Add a batch of a task: `values` [B, T], of which those without one of the `labels` [B, T] do not count."""
        counted = labels != NO_LOSS
        values = values.to(self.total.dtype) if self.total.dtype == torch.int64 else summable(values)
        self.total = self.total.to(values.dtype)
        self.total[task] += (values * counted).sum()
        self.count[task] += counted.sum()
