"""A linear map; for few rows, as in decoding, kernels that read the weight once."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.autocast import autocast_dtype
from ..core.autograd import plain
from ..core.backend import Op, loaded
from ..core.deterministic import is_deterministic
from ..core.recurrence import at_least_fp32
from . import tiles

MOST_INPUTS = 16384  # of the Triton kernels
FEW_ROWS = 2  # for which they serve any weight
MOST_PRODUCTS = 8  # of a launch
MOST_ROWS, MOST_OUTPUTS = 64, 8192  # up to which they serve half precision; the others take cuBLAS


def reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The sum of its definition, in at least fp32."""
    y = (at_least_fp32(x).unsqueeze(-2) * at_least_fp32(weight)).sum(-1)
    return (y if bias is None else y + at_least_fp32(bias)).to(x.dtype)


OP = Op("linear", reference=reference, torch=F.linear, gpu="kernels.linear.gpu.op:forward")


def few_rows(x: Tensor, weight: Tensor) -> bool:
    """Return whether the Triton kernels are made for a call: few rows, neither gradients nor casts.

    In deterministic mode, these are the tiles for tensor cores alone, which add in the order of those for many rows.
    """
    half, most = x.dtype in (torch.bfloat16, torch.float16), FEW_ROWS
    if is_deterministic():
        most = MOST_ROWS if tiles.implementation(x) == "triton" and _adds_alike(x, weight) else 0
    elif half and weight.shape[0] <= MOST_OUTPUTS:
        most = MOST_ROWS
    small = x.numel() <= most * x.shape[-1] and weight.shape[1] <= MOST_INPUTS
    differentiated = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return small and not differentiated and x.dtype == weight.dtype and autocast_dtype(x.device) is None


def _adds_alike(x: Tensor, weight: Tensor) -> bool:
    """Return whether tensor cores add in one order for the tiles of few rows and for those of many: on Hopper."""
    from ..gpu.device import HOPPER, capability  # only where there is Triton
    from ..gpu.tiles import INTERPRETED
    from .gpu.tiles import UNIT

    sizes = all(size % UNIT == 0 for size in weight.shape)
    return sizes and x.dtype == torch.bfloat16 and capability(x.device) == HOPPER and not INTERPRETED


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + bias: PyTorch's product, except for few rows without gradients, and in deterministic mode.

    Args:
        x: Inputs […,I].
        weight: W [O,I].
        bias: [O], or None.

    Returns:
        y […,O].

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"weight: expected [O,{x.shape[-1]}], got shape {tuple(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias: expected [{weight.shape[0]}], got shape {tuple(bias.shape)}")
    if not few_rows(x, weight) or (bias is not None and is_deterministic()):
        return tiles.linear(x, weight, bias)
    y: Tensor = OP(x, x, weight, bias)
    return y


class Product(NamedTuple):
    """activation(x Wᵀ)."""

    x: Tensor  # […,I]
    weight: Tensor  # [O,I]
    activation: Literal["none", "sigmoid", "tanh"] = "none"


def few_products(products: Sequence[Product]) -> list[Tensor] | None:
    """Compute products of one or two rows each, without gradients, in one launch.

    Args:
        products: The products. They all have the same number of rows.

    Returns:
        The result […,O] of each product; None if the kernel cannot compute them: call `linear` and the activation.
    """
    x, *others = (product.x for product in products)
    alike = all(other.shape[:-1] == x.shape[:-1] and other.dtype == x.dtype for other in others)
    if not alike or not 0 < x.numel() <= FEW_ROWS * x.shape[-1] or len(products) > MOST_PRODUCTS or is_deterministic():
        return None
    tensors = [tensor for product in products for tensor in product[:2]]
    # the weights of shards have no two axes
    if (
        not plain(tensors)
        or any(w.dim() != 2 or w.shape[1] != y.shape[-1] or not few_rows(y, w) for y, w, _ in products)
        or OP.backend(x) != "triton"
    ):
        return None
    results: list[Tensor] = loaded("kernels.linear.gpu.op:several")(products)
    return results
