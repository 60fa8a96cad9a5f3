"""The cross-entropy of a linear head: −log softmax(x Wᵀ) at the labels, without the logits of all tokens in memory."""

import math
from typing import Any

import torch
from torch import Tensor

from ..core.autocast import autocast_dtype
from ..core.backend import Op
from . import logits


def limits(x: Tensor, *rest: Any) -> str | None:
    """Why the Triton kernels cannot take the arguments: fp16 lacks the range for the probabilities of rare tokens."""
    return "which does not take fp16" if (autocast_dtype(x.device) or x.dtype) == torch.float16 else None


def loss_limits(x: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, cap: float | None) -> str | None:
    """As `limits`, for the loss with gradients, which the kernels compute for logits without a cap."""
    return limits(x) if cap is None else "which does not take a cap"


OP = Op(
    "linear_cross_entropy",
    reference=logits.reference,
    torch=logits.forward,
    gpu="kernels.linear_cross_entropy.gpu.op:forward",
    limits=loss_limits,
)
TOKEN_LOSSES = Op(
    "linear_token_losses",
    reference=logits.reference_token_losses,
    torch=logits.token_losses,
    gpu="kernels.linear_cross_entropy.gpu.op:token_losses",
    limits=limits,
)

LOSSES = Op(
    "losses_of_logits",
    reference=logits.row_losses,
    torch=logits.row_losses,
    gpu="kernels.linear_cross_entropy.gpu.op:row_losses",
    limits=limits,
)


def losses_of_logits(x: Tensor, labels: Tensor, *, ignore_index: int = -100) -> Tensor:
    """−log softmax(x_n) at label n of logits x [N,V], with gradients: the losses [N] of `linear_token_losses`."""
    losses: Tensor = LOSSES(x, x, labels, ignore_index)
    return losses


def linear_cross_entropy(
    x: Tensor, weight: Tensor, labels: Tensor, *, ignore_index: int = -100, cap: float | None = None
) -> Tensor:
    """Sum over tokens of −log softmax(x_n Wᵀ) at label n, in nats.

    On a GPU, only the logits of a few thousand tokens exist at a time, and the gradients are computed along with the
    loss if `x` or `weight` needs them: the backward pass only multiplies. With a cap, logits are
    cap · tanh(x_n Wᵀ / cap), and PyTorch holds those of all tokens in memory.

    Under autocast the product is computed in the autocast dtype, as in a linear layer, but the gradient of `weight` is
    summed in fp32.

    Args:
        x: Inputs of the head [N,D].
        weight: Weight of the head [V,D], in the dtype of x unless autocast is on.
        labels: [N] int64; each is in [0, V), or `ignore_index`. Any other is an error on the CPU; on a GPU, where an
            error would cost a synchronisation, it makes the loss and the gradients nan.
        ignore_index: Label of the tokens without a loss, whose inputs are not read.
        cap: Bound of the logits, above 0; None for none.

    Returns:
        The sum, a scalar in fp32 (fp64 for fp64).

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
        IndexError: A label is outside the vocabulary (on the CPU).
    """
    _check(x, weight, labels, cap)
    total: Tensor = OP(x, x, weight, labels, ignore_index, cap)
    return total


@torch.no_grad()
def linear_token_losses(
    x: Tensor, weight: Tensor, labels: Tensor, *, ignore_index: int = -100, cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """The loss of each token, and whether its label is the likeliest: for evaluation, without gradients.

    Only the logits of a thousand tokens or so exist at a time, on a CPU, too.

    Args:
        x, weight, labels, ignore_index, cap: As for `linear_cross_entropy`, which raises the same errors.

    Returns:
        losses: −log softmax(x_n Wᵀ) at label n in nats, [N] in fp32 (fp64 for fp64); 0 where the label is ignored.
        correct: [N] bool; false where the label is ignored.
    """
    _check(x, weight, labels, cap)
    losses, correct = TOKEN_LOSSES(x, x, weight, labels, ignore_index, cap)
    return losses, correct


def _check(x: Tensor, weight: Tensor, labels: Tensor, cap: float | None) -> None:
    if cap is not None and not 0 < cap < math.inf:
        raise ValueError(f"cap: expected a finite number above 0, or None, got {cap}")
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"x: expected a floating [N,D], got {x.dtype} {tuple(x.shape)}")
    if weight.dim() != 2 or weight.shape[1] != x.shape[1]:
        raise ValueError(f"weight: expected [V,{x.shape[1]}], got shape {tuple(weight.shape)}")
    if labels.shape != x.shape[:1] or labels.dtype != torch.int64:
        raise ValueError(f"labels: expected an int64 [{x.shape[0]}], got {labels.dtype} {tuple(labels.shape)}")
    for name, y in dict(weight=weight, labels=labels).items():
        if y.device != x.device:
            raise ValueError(f"{name}: is on {y.device}, but x is on {x.device}")
    if weight.dtype != x.dtype and autocast_dtype(x.device) is None:
        raise ValueError(f"weight: is {weight.dtype}, but x is {x.dtype}")
