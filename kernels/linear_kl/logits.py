"""The divergence of a linear head from a teacher's: by definition, and a thousand tokens at a time."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.allocation import new
from ..core.autocast import autocast_dtype, without_autocast
from ..core.autograd import Gradients, register
from ..core.elementwise import soft_cap
from ..core.recurrence import at_least_fp32
from ..linear.tiles import implementation, product

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


def _empty(args: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    dx = args.x.new_empty(args.x.shape if args.x_learns else 0)
    dweight = args.weight.new_empty(args.weight.shape if args.weight_learns else 0)
    return at_least_fp32(args.x.new_empty(())), dx, dweight


def _compute(args: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """The sum, and the gradients of x and of the weight; those that are not needed are empty."""
    x, weight, labels = args.x.contiguous(), args.weight.to(args.x.dtype), args.labels
    teacher_x, teacher_weight = args.teacher_x.contiguous(), args.teacher_weight.to(args.teacher_x.dtype)
    total, dx, dweight = _empty(args)
    total.zero_()
    dweight = at_least_fp32(dweight.zero_())  # the sum over all parts
    rows = max(1, LOGITS // len(weight))
    with without_autocast(x.device):
        for first in range(0, len(x), rows):
            some = slice(first, first + rows)
            logits = _logits(x[some], weight, args.cap, args.how)
            slope = None if args.cap is None else 1 - (logits / args.cap).square()
            log_q = logits.div_(args.temperature).log_softmax(-1)
            log_p = _logits(teacher_x[some], teacher_weight, args.teacher_cap, args.how)
            log_p = log_p.div_(args.temperature).log_softmax(-1)
            p, counted = log_p.exp(), (labels[some] != args.ignore_index)[:, None]
            total += log_p.sub_(log_q).mul_(p).masked_fill_(~counted, 0).sum()
            if not (args.x_learns or args.weight_learns):
                continue
            gradient = log_q.exp_().sub_(p).div_(args.temperature).masked_fill_(~counted, 0)
            gradient = gradient if slope is None else gradient.mul_(slope)
            if args.x_learns:
                product(gradient.to(x.dtype), weight, dx[some], args.how)
            if args.weight_learns:
                dweight.addmm_(gradient.T, x[some].to(gradient.dtype))
    return total, dx, dweight.to(args.weight.dtype)


def _logits(x: Tensor, weight: Tensor, cap: float | None, how: str) -> Tensor:
    """New logits of a head [rows,V] in at least fp32."""
    return soft_cap(at_least_fp32(product(x, weight.T, new(x, len(x), len(weight)), how)), cap)


def _differentiate(args: Arguments, needed: Any, gradient: Tensor, dx: Tensor, dweight: Tensor) -> Gradients:
    return {
        "x": (dx * gradient).to(dx.dtype) if needed.x else None,
        "weight": (dweight * gradient).to(dweight.dtype) if needed.weight else None,
    }


linear_kl = register("linear_kl", _compute, _differentiate, _empty)


def forward(
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
    """The sum of all divergences, whose gradients are computed with it."""
    if (dtype := autocast_dtype(x.device)) is not None:
        x, teacher_x = x.to(dtype), teacher_x.to(dtype)
    learning = torch.is_grad_enabled()
    learns = learning and x.requires_grad, learning and weight.requires_grad
    settings = labels, ignore_index, temperature, cap, teacher_cap
    return linear_kl(x, weight, teacher_x, teacher_weight, *settings, *learns, implementation(x))
