"""The divergence of a linear head from a teacher's: KL(softmax(t) ‖ softmax(s)), without the logits of all tokens."""

import math

import torch
from torch import Tensor

from ..core.backend import Op
from ..linear_cross_entropy import limits
from . import logits

OP = Op(
    "linear_kl",
    reference=logits.reference,
    torch=logits.forward,
    gpu="kernels.linear_kl.gpu.op:forward",
    limits=limits,
)


def linear_kl(
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    temperature: float = 1.0,
    cap: float | None = None,
    teacher_cap: float | None = None,
) -> Tensor:
    """Sum over tokens of KL(softmax(t_n / τ) ‖ softmax(s_n / τ)) in nats, with s = x Wᵀ and t the teacher's logits.

    Only the logits of a few thousand tokens (on a CPU, of about a thousand) exist at a time, and the gradients are
    computed along with the loss: the backward pass only multiplies. For 8 × 4,096 tokens, 576 channels and a vocabulary
    of 49,152 in bf16, both passes together need 0.64 GiB in PyTorch and 0.70 GiB in Triton, beyond the arguments. All
    logits of the two models would be 6 GiB.

    The teacher is a constant, to which no gradient flows. A cap bounds logits as in `linear_cross_entropy`, and so does
    autocast choose the dtype of the products. Without a cap, an infinite or nan logit of a token that counts makes the
    sum inf or nan.

    Args:
        x: Inputs of the student's head [N,D].
        weight: Weight of this head [V,D].
        teacher_x: Inputs of the teacher's head [N,E].
        teacher_weight: Weight of this head [V,E].
        labels: [N] int64; tokens whose label is `ignore_index` do not count, and their inputs are not read. Other
            values of labels are not read.
        ignore_index: Label of the tokens without a loss.
        temperature: τ. The sum is not multiplied by τ².
        cap: Bound of the student's logits, above 0; None for none.
        teacher_cap: Bound of the teacher's logits, above 0; None for none.

    Returns:
        The sum, a scalar in fp32 (fp64 for fp64).

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """
    for name, number in {"temperature": temperature, "cap": cap, "teacher_cap": teacher_cap}.items():
        if number is not None and not 0 < number < math.inf:
            raise ValueError(f"{name}: expected a finite number above 0, got {number}")
    for prefix, inputs, head in (("", x, weight), ("teacher_", teacher_x, teacher_weight)):
        if inputs.dim() != 2 or not inputs.is_floating_point() or len(inputs) != len(x):
            count = "N" if inputs is x else len(x)
            raise ValueError(f"{prefix}x: expected a floating [{count},D], got {inputs.dtype} {tuple(inputs.shape)}")
        if head.dim() != 2 or head.shape[1] != inputs.shape[1]:
            raise ValueError(f"{prefix}weight: expected [V,{inputs.shape[1]}], got shape {tuple(head.shape)}")
    if len(weight) != len(teacher_weight):
        raise ValueError(f"teacher_weight: has {len(teacher_weight)} rows, but weight has {len(weight)}")
    if labels.shape != x.shape[:1] or labels.dtype != torch.int64:
        raise ValueError(f"labels: expected an int64 [{len(x)}], got {labels.dtype} {tuple(labels.shape)}")
    others = {"weight": weight, "teacher_x": teacher_x, "teacher_weight": teacher_weight, "labels": labels}
    for name, tensor in others.items():
        if tensor.device != x.device:
            raise ValueError(f"{name}: is on {tensor.device}, but x is on {x.device}")
    total: Tensor = OP(
        x, x, weight, teacher_x.detach(), teacher_weight.detach(), labels, ignore_index, temperature, cap, teacher_cap
    )
    return total
