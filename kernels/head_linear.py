"""A linear map for each head: batched products that read and write their streams where they lie."""

from typing import Any, NamedTuple

from torch import Tensor

from .core.allocation import new
from .core.autocast import autocast_dtype
from .core.autograd import Gradients, register
from .core.recompute import remake
from .linear.tiles import implementation, product


def heads_first(x: Tensor) -> Tensor:
    """[B,T,H,D] as [H,B·T,D], for batched products, which take such strides as they are."""
    return x.flatten(0, 1).transpose(0, 1)


class Arguments(NamedTuple):
    x: Tensor  # [B,T,H,K]
    weight: Tensor  # [H,K,N]
    how: str = "torch"  # the implementation of products in deterministic mode


def _empty(args: Arguments) -> tuple[Tensor]:
    return (new(args.x, *args.x.shape[:3], args.weight.shape[2]),)


def compute(args: Arguments) -> tuple[Tensor]:
    """y [B,T,H,N]."""
    (x, weight, how), (y,) = args, _empty(args)
    # A product without `out` would lie heads first, and become [B,T,H,N] by a copy of the largest tensor of the layer.
    product(heads_first(x), weight.to(x.dtype), heads_first(y), how)
    return (y,)


def differentiate(args: Arguments, needed: Any, dy: Tensor) -> Gradients:
    """The gradients of x and of the weight."""
    (x, weight, how), dy, dx, dweight = args, heads_first(dy), None, None
    if needed.x:
        dx = new(x)
        product(dy, weight.to(x.dtype).mT, heads_first(dx), how)
    if needed.weight:
        dweight = product(heads_first(x).mT, dy, new(x, *weight.shape), how, divide=True).to(weight.dtype)
    return {"x": dx, "weight": dweight}


apply = register("head_linear", compute, differentiate, _empty)


def head_linear(x: Tensor, weight: Tensor, *, save_result: bool = False) -> Tensor:
    """x_h W_h for each head h, in the dtype of x, or of autocast where that is on.

    Inside `recomputing()`, the backward pass recomputes the result unless `save_result`, since it may be many times
    larger than x.

    Args:
        x: [B,T,H,K].
        weight: W [H,K,N].
        save_result: Whether what follows may save the result inside `recomputing()`.

    Returns:
        y [B,T,H,N].

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """
    if x.dim() != 4:
        raise ValueError(f"x: expected [B,T,H,K], got shape {tuple(x.shape)}")
    if not x.is_floating_point():
        raise ValueError(f"x: expected a floating dtype, got {x.dtype}")
    if weight.dim() != 3 or weight.shape[:2] != x.shape[2:]:
        raise ValueError(f"weight: expected [{x.shape[2]},{x.shape[3]},N], got shape {tuple(weight.shape)}")
    if (dtype := autocast_dtype(x.device)) is not None:
        x = x.to(dtype)
    how = implementation(x)
    y = apply(x, weight, how)
    return y if save_result else remake(y, lambda *args: compute(Arguments(*args))[0], x, weight, how)
