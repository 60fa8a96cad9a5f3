"""A loss of the logits of a linear head and its gradients, for a part of the tokens at a time."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.allocation import new
from ..core.autocast import without_autocast
from ..core.recurrence import at_least_fp32
from .tiles import add_product, product

ALIGNED = 64  # rows of logits begin at multiples of this many elements


def head_loss(
    heads: Sequence[tuple[Tensor, Tensor]],
    loss: Callable[..., Tensor],
    *,
    ignored: Tensor,
    size: int,
    x_learns: bool,
    weight_learns: bool,
    how: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of the losses of N tokens, and its gradients for the first head.

    Args:
        heads: Inputs [N,D] and weight [V,D] of each head; D may differ. Products have the dtype of the inputs.
        loss: `loss(some, losses, *logits)` writes the losses [n] of `some` tokens, a slice, and returns the gradient of
            the first logits. The logits [n,V] of each head may be overwritten.
        ignored: [N] bool; inputs of the first head at these tokens are not read, so that nan there stays out of the
            gradient of the weight.
        size: Number of logits of each head in memory at a time.
        x_learns, weight_learns: Which gradients are needed; the others are empty.
        how: The implementation of products in deterministic mode.
    """
    dtype = heads[0][1].dtype
    heads = [(x.contiguous(), weight.to(x.dtype).contiguous()) for x, weight in heads]
    x, weight = heads[0]
    N, V = len(x), len(weight)
    losses = new(x, N, dtype=torch.promote_types(x.dtype, torch.float32))
    dx = new(x, *(x.shape if x_learns else (0,)))
    dweight = new(x, *(weight.shape if weight_learns else (0,)), dtype=losses.dtype)
    if not N:
        dweight.zero_()
    rows = -(-N // max(1, -(-N * V // size)))
    buffers = [new(y, rows, -(-V // ALIGNED) * ALIGNED)[:, :V] for y, _ in heads]
    with without_autocast(x.device):
        for first in range(0, N, max(1, rows)):
            some = slice(first, min(first + rows, N))
            part = x[some].masked_fill(ignored[some, None], 0)
            inputs = [part, *(y[some] for y, _ in heads[1:])]
            logits = (
                product(y, head.T, buffer[: len(y)], how)
                for y, (_, head), buffer in zip(inputs, heads, buffers, strict=True)
            )
            gradient = loss(some, losses[some], *logits)
            if x_learns:
                product(gradient.to(x.dtype), weight, dx[some], how)
            if weight_learns:
                add_product(dweight, gradient, part.to(gradient.dtype), first > 0)
            del gradient  # before the next one is computed
    return losses.sum(), dx, dweight.to(dtype)


def empty(args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised results of `head_loss` for the arguments of an op: x, weight, x_learns and weight_learns."""
    dx = args.x.new_empty(args.x.shape if args.x_learns else 0)
    dweight = args.weight.new_empty(args.weight.shape if args.weight_learns else 0)
    return at_least_fp32(args.x.new_empty(())), dx, dweight
