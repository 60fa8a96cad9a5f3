"""The cross-entropy of a linear head and its gradients, a few thousand tokens at a time."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.allocation import new
from ...core.autocast import autocast_dtype
from ...core.autograd import Gradients, register
from ...gpu.launch import cdiv, enqueue, next_power_of_2
from ...linear.head_loss import empty, head_loss
from .. import logits as in_pytorch
from .rows import BLOCK, SCALED, WARPS, scale, softmax_loss

LOGITS = 2**28  # in memory at a time, 0.5 GB in bf16: 8192 tokens at a vocabulary of 32,000, enough for fast products


class Arguments(NamedTuple):
    x: Tensor  # [N,D]
    weight: Tensor  # [V,D]
    labels: Tensor  # [N]
    ignore_index: int
    x_learns: bool
    weight_learns: bool


def _compute(args: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of the losses, and the gradients of x and of the weight; those that are not needed are empty."""
    x, weight, labels, ignore_index, *learns = args
    labels = labels.contiguous()

    def loss(some: slice, losses: Tensor, logits: Tensor) -> Tensor:
        _softmax_loss(logits, labels[some], losses, ignore_index, any(learns))
        return logits

    return head_loss(
        [(x, weight)],
        loss,
        ignored=labels == ignore_index,
        size=LOGITS,
        x_learns=args.x_learns,
        weight_learns=args.weight_learns,
        how="triton",
    )


def _softmax_loss(logits: Tensor, labels: Tensor, losses: Tensor, ignore_index: int, gradient: bool) -> None:
    """Write the losses [N] of logits [N,V], and with `gradient` overwrite the logits by their gradients."""
    V = logits.shape[1]
    constants = {"BLOCK": min(BLOCK, next_power_of_2(V)), "GRADIENT": gradient, "warps": WARPS}
    enqueue(softmax_loss, len(logits), logits, labels, losses, ignore_index, logits.stride(0), V, **constants)


class Rows(NamedTuple):
    logits: Tensor  # [N,V]
    labels: Tensor  # [N]
    ignore_index: int


def _empty_losses(args: Rows) -> tuple[Tensor]:
    return (new(args.logits, len(args.logits), dtype=torch.float32),)


def _losses(args: Rows) -> tuple[Tensor]:
    (losses,) = _empty_losses(args)
    _softmax_loss(args.logits, args.labels, losses, args.ignore_index, gradient=False)
    return (losses,)


def _differentiate_losses(args: Rows, needed: Any, gradient: Tensor) -> Gradients:
    dlogits = args.logits.clone()
    _softmax_loss(dlogits, args.labels, new(gradient, *gradient.shape), args.ignore_index, gradient=True)
    # not a number where a label is outside the vocabulary, as the loss is
    return {"logits": dlogits.mul_(gradient[:, None])}


losses_of_rows = register("losses_of_logits", _losses, _differentiate_losses, _empty_losses)


def row_losses(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """The losses [N] of logits [N,V]."""
    losses: Tensor = losses_of_rows(logits.contiguous(), labels.contiguous(), ignore_index)
    return losses


def differentiate(args: Arguments, needed: Any, gradient: Tensor, dx: Tensor, dweight: Tensor) -> Gradients:
    """The gradients of x and of the weight, which were computed with the loss."""
    return {
        "x": _scaled(dx, gradient) if needed.x else None,
        "weight": _scaled(dweight, gradient) if needed.weight else None,
    }


def _scaled(x: Tensor, factor: Tensor) -> Tensor:
    """x · factor, a scalar on the device; PyTorch's product of two dtypes takes four times as long."""
    y = new(x)
    if x.numel():
        enqueue(scale, cdiv(x.numel(), SCALED), x, factor, y, x.numel(), BLOCK=SCALED, warps=8)
    return y


linear_cross_entropy = register("linear_cross_entropy", _compute, differentiate, empty)


def forward(x: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, cap: None) -> Tensor:
    """Sum of the losses; `limits` keeps calls with a cap away."""
    if (dtype := autocast_dtype(x.device)) is not None:
        x = x.to(dtype)
    learning = torch.is_grad_enabled()
    return linear_cross_entropy(
        x, weight, labels, ignore_index, learning and x.requires_grad, learning and weight.requires_grad
    )


def token_losses(
    x: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, cap: float | None
) -> tuple[Tensor, Tensor]:
    """Losses [N] and correct [N]."""
    return in_pytorch.token_losses(x, weight, labels, ignore_index, cap, row_losses)
