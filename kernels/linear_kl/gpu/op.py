"""The divergence of a linear head from a teacher's and its gradients, a few thousand tokens at a time."""

from typing import Any

from torch import Tensor

from ...core.autograd import register
from ...gpu.launch import enqueue, next_power_of_2
from ...linear.head_loss import empty
from ...linear_cross_entropy.gpu.op import differentiate
from ..logits import Arguments, compute, prepared
from . import rows

LOGITS = 2**27  # of each of the two models in memory at a time: together those of `linear_cross_entropy`


def _divergence(args: Arguments, some: slice, sums: Tensor, logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Write the divergences [n] of some tokens, and overwrite their logits [n,V] by the gradient."""
    n, V = logits.shape
    caps = (None if cap is None else float(cap) for cap in (args.cap, args.teacher_cap))
    numbers = args.ignore_index, logits.stride(0), V, 1 / args.temperature, *caps
    constants = {"BLOCK": min(rows.BLOCK, next_power_of_2(V)), "GRADIENT": args.x_learns or args.weight_learns}
    tensors = logits, teacher_logits, args.labels[some].contiguous(), sums
    enqueue(rows.divergence, n, *tensors, *numbers, **constants, warps=rows.WARPS)
    return logits


def _compute(args: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    return compute(args, _divergence, LOGITS)


linear_kl = register("linear_kl_triton", _compute, differentiate, empty)


def forward(*args: Any) -> Tensor:
    """The sum of all divergences, whose gradients are computed with it."""
    total: Tensor = linear_kl(*prepared(*args), "triton")
    return total
