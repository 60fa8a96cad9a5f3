"""The tensors of one call of the linear recurrence, and what its kernel paths have in common."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.allocation import aligned
from ...gpu.launch import LaunchSpec
from ...gpu.plan import prepared
from .plan import LinearRecurrence
from .segments import scan

FP32 = torch.float32
SCAN_BLOCK = 1024


class Arguments(NamedTuple):
    """Arguments of the op, which `linear_recurrence` explains; gates and states are contiguous."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None  # in fp32, or in bf16 where one pass does all
    beta: Tensor | None  # in fp32
    initial_state: Tensor | None  # in fp32
    cu_seqlens: Tensor | None
    scale: float
    subheads: int
    keep: bool  # whether the states before all chunks are saved for the backward pass


class Wanted(NamedTuple):
    """Flags of the gates that need gradients."""

    log_decay: bool
    beta: bool


class InputGradients(NamedTuple):
    """Gradients of q and k per recurrence [B,T,H·E,K], of v [B,T,H,V], and those of the gates."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None = None
    beta: Tensor | None = None


class Saved(NamedTuple):
    """Tensors that the forward pass saves for the backward pass, where they exist."""

    first: Tensor | None = None  # the states that segments start from
    states: Tensor | None = None  # the states before all chunks
    ends: Tensor | None = None  # the sums of decays in both halves of all chunks


class Call:
    """Tensors of one call.

    Args:
        plan: Plan of the call.
        args: Arguments of the op.
        grad: In the backward pass, the gradient of the output, contiguous.
    """

    def __init__(self, plan: LinearRecurrence, args: Arguments, grad: Tensor | None):
        self.plan, self.log_decay, self.beta = plan, args.log_decay, args.beta
        q, k, v = (x.contiguous() if copy else x for x, copy in zip(args[:3], plan.copied, strict=True))
        if plan.gluon:
            q, k, v = aligned(q), aligned(k), aligned(v)
            grad = None if grad is None else aligned(grad)
            self.log_decay = None if self.log_decay is None else aligned(self.log_decay)
        self.q, self.k, self.v, self.grad = q, k, v, grad

    def output(self, o: Tensor, first: Tensor | None, last: Tensor | None, *, keep: bool) -> Saved:
        """Fill o [B,T,H·E,V] from the states that segments start from, and `last` with the states that they end with.

        Args:
            o: Where to put the outputs.
            first: The states that segments start from; None for zeros.
            last: Where to put those that they end with, if needed.
            keep: Whether to return the states before all chunks, if the path has them.
        """
        raise NotImplementedError

    def gradients(self, saved: Saved, last: Tensor | None, first_grad: Tensor | None, wanted: Wanted) -> InputGradients:
        """All gradients, from those of the states that segments end with.

        Args:
            saved: What the forward pass saved, or at least the states that segments start from.
            last: The gradients of the states that segments end with; None for zeros.
            first_grad: Where to put the gradients of the states that they start from, if needed.
            wanted: Which gates need gradients.
        """
        raise NotImplementedError

    def segment_states(self, last: Tensor, survives: Tensor, *, reverse: bool) -> None:
        """Fill what each segment adds to the state, or in reverse to its gradient, and how much of it survives."""
        raise NotImplementedError

    def starts(self, first: Tensor | None, last: Tensor | None, *, reverse: bool = False) -> Tensor | None:
        """The states that segments start from, or in reverse the gradients of those that they end with.

        Args:
            first: The states of the sequences at that end; None for zeros.
            last: Where to put those at the other end, if needed; filled here if sequences are cut into segments.
            reverse: Whether it is about the gradients.
        """
        plan = self.plan
        if not plan.segmented:
            return first
        local = plan.new(plan.segments, plan.heads, plan.K, plan.V, dtype=FP32)
        survives = plan.new(plan.segments, plan.heads, plan.K if plan.channel else 1, dtype=FP32)
        self.segment_states(local, survives, reverse=reverse)
        _combine(plan, reverse)(local, survives, first, last, plan.layout.sequences)
        return local


def sum_over_tokens(plan: LinearRecurrence, gradient: Tensor | None) -> Tensor | None:
    """The gradient of the log decay, which for a constant decay is a sum over all tokens."""
    return gradient.sum((0, 1)) if gradient is not None and plan.gate == "constant" else gradient


@prepared
def _combine(plan: LinearRecurrence, reverse: bool) -> LaunchSpec:
    """From what each segment adds to the state to the states that segments start from."""
    programs = -(-plan.K * plan.V // SCAN_BLOCK) * plan.heads * plan.sequences
    how: dict[str, Any] = {"CHANNEL": plan.channel, "DECAY": plan.gate != "none", "REVERSE": reverse}
    return LaunchSpec(scan, programs, plan.heads, K=plan.K, V=plan.V, BLOCK=SCAN_BLOCK, **how, checked=True)
