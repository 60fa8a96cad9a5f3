"""Evaluation metrics: the loss over all tokens and by position in the context, and loss and accuracy by task."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import Metric

from mixers import ContextParallel, positions
from zoo.data.batch import NO_LOSS


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of each token in fp32.

    Args:
        logits: [B, T, vocab], any floating dtype.
        labels: [B, T] int, already shifted; -100 has no loss.

    Returns:
        [B, T] fp32, in nats; 0 without a label.
    """
    losses = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=NO_LOSS, reduction="none")
    return losses.view_as(labels)


@runtime_checkable
class HasLoss(Protocol):
    """A model that computes its loss more cheaply than from the logits of all tokens."""

    def loss(
        self,
        tokens: Tensor,
        labels: Tensor,
        cu_seqlens: Tensor | None = None,
        context_parallel: ContextParallel | None = None,
    ) -> Tensor:
        """The sum of the losses of all labels."""
        ...


def total_loss(
    model: Callable[..., Any],
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
    if isinstance(model, HasLoss):
        return model.loss(tokens, labels, cu_seqlens, **shared)
    return token_losses(model(tokens, cu_seqlens=cu_seqlens, **shared)[0], labels).sum()


@runtime_checkable
class HasTokenLosses(Protocol):
    """A model that computes the losses of its labels more cheaply than from the logits of all tokens."""

    def token_losses(
        self,
        tokens: Tensor,
        labels: Tensor,
        state: Any = None,
        *,
        cu_seqlens: Tensor | None = None,
        context_parallel: ContextParallel | None = None,
    ) -> tuple[Tensor, Tensor, Any]:
        """The loss of each label, whether it is the likeliest token, and the next state."""
        ...


def label_scores(
    model: Callable[..., Any],
    tokens: Tensor,
    labels: Tensor,
    cu_seqlens: Tensor | None = None,
    context_parallel: ContextParallel | None = None,
) -> tuple[Tensor, Tensor]:
    """The loss of each label, and whether it is the likeliest token: by the model's `token_losses` if it has one.

    Args:
        model, tokens, labels, cu_seqlens, context_parallel: As for `total_loss`.

    Returns:
        Losses [B, T] fp32 in nats, and correct [B, T] bool; 0 and false without a label.
    """
    shared = {} if context_parallel is None else {"context_parallel": context_parallel}
    if isinstance(model, HasTokenLosses):
        losses, correct, _ = model.token_losses(tokens, labels, cu_seqlens=cu_seqlens, **shared)
        return losses, correct
    logits = model(tokens, cu_seqlens=cu_seqlens, **shared)[0]
    return token_losses(logits, labels), logits.argmax(-1) == labels


class Losses(NamedTuple):
    """Mean losses in nats per token: `loss` over all tokens, `by_position` [buckets] (nan where there are none)."""

    loss: Tensor
    perplexity: Tensor
    by_position: Tensor


class Sums(Metric):
    """A metric whose sums keep their dtype when the module around it is cast: bf16 would round away what is added."""

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> nn.Module:
        return super()._apply(lambda x: x.to(fn(x).device), exclude_state)


class ContextLoss(Sums):
    """Mean loss per token, its perplexity, and the mean loss in equal buckets of the position in the context.

    If a model uses its context, its loss falls with the position.

    Args:
        context_length: Number of positions that the buckets divide; later ones count in the last bucket. None takes
            the length of the first batch, or of its longest document if documents are packed.
        buckets: Number of buckets.
    """

    full_state_update = False

    def __init__(self, context_length: int | None = None, buckets: int = 8) -> None:
        super().__init__()
        self.context_length = context_length
        self.buckets = buckets
        self.add_state("total", torch.zeros(buckets), dist_reduce_fx="sum")  # fp32: some accelerators have no fp64
        self.add_state("count", torch.zeros(buckets, dtype=torch.int64), dist_reduce_fx="sum")

    total: Tensor
    count: Tensor

    def update(self, losses: Tensor, labels: Tensor, cu_seqlens: Tensor | None) -> None:
        """Add a batch: `losses` [B, T] of `token_losses`, its `labels` [B, T] and document bounds [N+1] or None."""
        position, _ = positions(labels, None, cu_seqlens)
        if self.context_length is None:
            self.context_length = int(position.max()) + 1
        bucket = (position * self.buckets // self.context_length).clamp(max=self.buckets - 1).expand_as(labels)
        counted = labels != NO_LOSS
        self.total.index_add_(0, bucket.flatten(), (losses.float() * counted).flatten())
        self.count.index_add_(0, bucket.flatten(), counted.flatten().to(self.count.dtype))

    def compute(self) -> Losses:
        """The means over all batches since the last reset, over all processes."""
        loss = self.total.sum() / self.count.sum()
        return Losses(loss, loss.exp(), self.total / self.count)


class TaskAccuracy(Sums):
    """The fraction of labels that are the likeliest token: over all labels, and by task.

    Args:
        tasks: Number of tasks.
    """

    full_state_update = False

    def __init__(self, tasks: int = 1) -> None:
        super().__init__()
        self.add_state("correct", torch.zeros(tasks, dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros(tasks, dtype=torch.int64), dist_reduce_fx="sum")

    correct: Tensor
    count: Tensor

    def update(self, correct: Tensor, labels: Tensor, task: int = 0) -> None:
        """Add a batch of a task: `correct` [B, T] bool of `label_scores`, and its `labels` [B, T]."""
        self.correct[task] += correct.sum()
        self.count[task] += (labels != NO_LOSS).sum()

    def compute(self) -> tuple[Tensor, Tensor]:
        """The accuracy of all labels, and by task [tasks], over all processes; nan where there was no label."""
        return self.correct.sum() / self.count.sum(), self.correct / self.count


class TaskLoss(Sums):
    """The mean loss of each task in nats per token.

    Args:
        tasks: Number of tasks.
    """

    full_state_update = False

    def __init__(self, tasks: int = 1) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(tasks), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros(tasks, dtype=torch.int64), dist_reduce_fx="sum")

    total: Tensor
    count: Tensor

    def update(self, losses: Tensor, labels: Tensor, task: int = 0) -> None:
        """Add a batch of a task: `losses` [B, T] of `token_losses`, and its `labels` [B, T]."""
        counted = labels != NO_LOSS
        self.total[task] += (losses.float() * counted).sum()
        self.count[task] += counted.sum()

    def compute(self) -> Tensor:
        """The losses by task [tasks], over all processes; nan where there was no label."""
        return self.total / self.count
