"""The cross-entropy of a linear head and its gradients, a few thousand tokens at a time."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.allocation import new
from ...core.autocast import autocast_dtype, without_autocast
from ...core.autograd import Gradients, register
from ...gpu.launch import cdiv, enqueue, next_power_of_2
from ...linear.tiles import product
from .. import logits as in_pytorch
from .rows import BLOCK, SCALED, WARPS, scale, softmax_loss

LOGITS = 2**28  # in memory at once, 0.5 GB in bf16: 8192 tokens at a vocabulary of 32,000, enough for fast products
ALIGNED = 64  # rows of logits begin at multiples of this many elements


class Arguments(NamedTuple):
    x: Tensor  # [N,D]
    weight: Tensor  # [V,D]
    labels: Tensor  # [N]
    ignore_index: int
    x_learns: bool
    weight_learns: bool


def _compute(args: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of the losses, and the gradients of x and of the weight; those that are not needed are empty."""
    x, weight, labels, ignore_index, x_learns, weight_learns = args
    (N, D), V = x.shape, weight.shape[0]
    x, labels = x.contiguous(), labels.contiguous()
    head = weight.to(x.dtype).contiguous()
    losses = new(x, N, dtype=torch.float32)
    dx = new(x, *((N, D) if x_learns else (0,)))
    dweight = new(x, *((V, D) if weight_learns else (0,)), dtype=torch.float32)
    if not N:
        dweight.zero_()
    rows = cdiv(N, max(1, cdiv(N * V, LOGITS)))
    buffer = new(x, rows, cdiv(V, ALIGNED) * ALIGNED)[:, :V]
    with without_autocast(x.device):
        for first in range(0, N, max(1, rows)):
            some = slice(first, min(first + rows, N))
            logits = product(x[some], head.T, buffer[: some.stop - first], "triton")
            _softmax_loss(logits, labels[some], losses[some], ignore_index, x_learns or weight_learns)
            if x_learns:
                product(logits, head, dx[some], "triton")
            if weight_learns:
                add_product(dweight, logits, x[some], first > 0)
    return losses.sum(), dx, dweight.to(weight.dtype)


def _softmax_loss(logits: Tensor, labels: Tensor, losses: Tensor, ignore_index: int, gradient: bool) -> None:
    """Write the losses [N] of logits [N,V], and with `gradient` overwrite the logits by their gradients."""
    V = logits.shape[1]
    constants = {"BLOCK": min(BLOCK, next_power_of_2(V)), "GRADIENT": gradient, "warps": WARPS}
    enqueue(softmax_loss, len(logits), logits, labels, losses, ignore_index, logits.stride(0), V, **constants)


def row_losses(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """The losses [N] of logits [N,V]."""
    logits = logits.contiguous()
    losses = new(logits, len(logits), dtype=torch.float32)
    _softmax_loss(logits, labels.contiguous(), losses, ignore_index, gradient=False)
    return losses


def add_product(total: Tensor, dlogits: Tensor, x: Tensor, add: bool) -> None:
    """Write dlogitsᵀ x to `total` [V,D] in fp32, or add it there; nothing is rounded to the dtype of x."""
    left = dlogits.T
    if x.dtype != torch.float32 and x.device.type != "cuda":  # the CPU has no product with an fp32 output
        left, x = left.float(), x.float()
    if x.dtype == torch.float32:
        torch.addmm(total, left, x, beta=int(add), out=total)
    elif add:
        torch.addmm(total, left, x, out_dtype=torch.float32, out=total)
    else:
        torch.mm(left, x, out_dtype=torch.float32, out=total)


def _differentiate(args: Arguments, needed: Any, gradient: Tensor, dx: Tensor, dweight: Tensor) -> Gradients:
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


def _empty(args: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    dx = args.x.new_empty(args.x.shape if args.x_learns else 0)
    dweight = args.weight.new_empty(args.weight.shape if args.weight_learns else 0)
    return args.x.new_empty((), dtype=torch.float32), dx, dweight


linear_cross_entropy = register("linear_cross_entropy", _compute, _differentiate, _empty)


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
