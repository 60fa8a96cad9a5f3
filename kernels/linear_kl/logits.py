"""The divergence of a linear head from a teacher's: by definition, and a thousand tokens at a time."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.autocast import autocast_dtype, without_autocast
from ..core.autograd import Gradients, register
from ..core.elementwise import soft_cap
from ..core.recurrence import at_least_fp32
from ..linear.head_loss import empty, head_loss
from ..linear.tiles import implementation

LOGITS = 2**25  # of each model in memory at a time: 683 tokens at a vocabulary of 49,152


def reference(
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    labels: Tensor,
    ignore_index: int,
    temperature: float,
    cap: float | None,
    teacher_cap: float | None,
) -> Tensor:
    """The sum of all divergences, in at least fp32."""
    counted = labels != ignore_index
    with without_autocast(x.device):
        student, teacher = (
            soft_cap(at_least_fp32(inputs[counted]) @ at_least_fp32(head).T, bound).div(temperature).log_softmax(-1)
            for inputs, head, bound in ((x, weight, cap), (teacher_x, teacher_weight, teacher_cap))
        )
        return (teacher.exp() * (teacher - student)).sum()


class Arguments(NamedTuple):
    x: Tensor  # [N,D]
    weight: Tensor  # [V,D]
    teacher_x: Tensor  # [N,E]
    teacher_weight: Tensor  # [V,E]
    labels: Tensor  # [N]
    ignore_index: int
    temperature: float
    cap: float | None
    teacher_cap: float | None
    x_learns: bool
    weight_learns: bool
    how: str  # the implementation of products in deterministic mode


def compute(args: Arguments, divergence: Callable[..., Tensor], size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The sum, and the gradients of x and of the weight; those that are not needed are empty."""
    return head_loss(
        [(args.x, args.weight), (args.teacher_x, args.teacher_weight)],
        partial(divergence, args),
        ignored=args.labels == args.ignore_index,
        size=size,
        x_learns=args.x_learns,
        weight_learns=args.weight_learns,
        how=args.how,
    )


def _divergence(args: Arguments, some: slice, sums: Tensor, logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Write the divergences [n] of some tokens, and return the gradient of their logits [n,V]."""
    ignored = (args.labels[some] == args.ignore_index)[:, None]
    log_q = soft_cap(at_least_fp32(logits), args.cap)
    slope = None if args.cap is None else 1 - (log_q / args.cap).square()
    log_q = log_q.div_(args.temperature).log_softmax(-1)
    log_p = soft_cap(at_least_fp32(teacher_logits), args.teacher_cap).div_(args.temperature).log_softmax(-1)
    p = log_p.exp()
    sums.copy_(log_p.sub_(log_q).mul_(p).masked_fill_(ignored, 0).sum(-1))
    if not (args.x_learns or args.weight_learns):
        return logits
    gradient = log_q.exp_().sub_(p).div_(args.temperature)
    return (gradient if slope is None else gradient.mul_(slope)).masked_fill_(ignored, 0)


def _differentiate(args: Arguments, needed: Any, gradient: Tensor, dx: Tensor, dweight: Tensor) -> Gradients:
    return {
        "x": (dx * gradient).to(dx.dtype) if needed.x else None,
        "weight": (dweight * gradient).to(dweight.dtype) if needed.weight else None,
    }


def _compute(args: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    return compute(args, _divergence, LOGITS)


linear_kl = register("linear_kl", _compute, _differentiate, empty)


def prepared(x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor, *settings: Any) -> tuple[Any, ...]:
    """The `Arguments` of a call but the last, with inputs in the dtype of autocast."""
    if (dtype := autocast_dtype(x.device)) is not None:  # fp64 stays fp64
        x, teacher_x = (y if y.dtype == torch.float64 else y.to(dtype) for y in (x, teacher_x))
    learning = torch.is_grad_enabled()
    learns = learning and x.requires_grad, learning and weight.requires_grad
    return x, weight, teacher_x, teacher_weight, *settings, *learns


def forward(x: Tensor, *args: Any) -> Tensor:
    """The sum of all divergences, whose gradients are computed with it."""
    total: Tensor = linear_kl(*prepared(x, *args), implementation(x))
    return total
