"""Matrix products with tiles of a fixed size: a row of the result does not depend on the others, or their number.

Libraries choose tiles, and how they split the inner axis, by the number of rows. Here Triton computes every tile of the
result with one loop over the whole inner axis, and PyTorch gets the same number of rows in every call, the last of
which is padded.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.allocation import new
from ..core.autocast import autocast_dtype
from ..core.autograd import Gradients, register
from ..core.backend import Op
from ..core.deterministic import is_deterministic

ROWS = 64  # of each call of PyTorch
ALIGNED = 64  # bytes at which libraries for CPUs take every tile alike


def by_tiles(a: Tensor, b: Tensor, y: Tensor) -> None:
    """Write a [M,K] times b [K,N] to y [M,N], `ROWS` rows in each call of PyTorch."""
    if not a.is_contiguous() or a.data_ptr() % ALIGNED:
        a = a.clone(memory_format=torch.contiguous_format)
    full = len(a) - len(a) % ROWS
    for first in range(0, full, ROWS):
        torch.mm(a[first : first + ROWS], b, out=y[first : first + ROWS])
    if full < len(a):
        tile = torch.cat([a[full:], a.new_zeros(ROWS - len(a) + full, a.shape[1])])
        y[full:] = (tile @ b)[: len(a) - full]


def in_torch(a: Tensor, b: Tensor, y: Tensor, *, divide: bool) -> None:
    """Write a [H,M,K] times b [H,K,N] to y [H,M,N]; the sum is not divided."""
    for one in zip(a, b, y, strict=True):
        by_tiles(*one)


PRODUCT = Op("product", reference=in_torch, torch=in_torch, gpu="kernels.linear.gpu.tiles:multiply")


def implementation(x: Tensor) -> str:
    """The implementation of products of a call, which its backward pass follows: torch or triton."""
    return "triton" if is_deterministic() and PRODUCT.backend(x) == "triton" else "torch"


def product(a: Tensor, b: Tensor, out: Tensor, how: str, *, divide: bool = False) -> Tensor:
    """Return a [M,K] times b [K,N], or of batches of matrices [H,M,K] and [H,K,N], written to `out`.

    For the code of ops, without gradients. PyTorch computes it; in deterministic mode `how` says which implementation
    with fixed tiles does. With `divide`, for sums over tokens, their parts may depend on how many there are.
    """
    if not is_deterministic():
        return (torch.mm if a.dim() == 2 else torch.bmm)(a, b, out=out)
    with torch.no_grad():
        batched = (a, b, out) if a.dim() == 3 else (a[None], b[None], out[None])
        PRODUCT.load(how)(*batched, divide=divide)
    return out


class Factors(NamedTuple):
    a: Tensor  # [H,M,K]
    b: Tensor  # [H,K,N]
    how: str


def _no_products(args: Factors) -> tuple[Tensor]:
    return (new(args.a, *args.a.shape[:2], args.b.shape[2]),)


def _products(args: Factors) -> tuple[Tensor]:
    (y,) = _no_products(args)
    return (product(*args[:2], y, args.how),)


def _differentiate_products(args: Factors, needed: Any, dy: Tensor) -> Gradients:
    a, b, how = args
    dy = dy.contiguous()
    return {
        "a": product(dy, b.mT, new(a, *a.shape), how) if needed.a else None,
        "b": product(a.mT, dy, new(b, *b.shape), how) if needed.b else None,
    }


# a [H,M,K] times b [H,K,N], with gradients; otherwise like `product`
tiled_products = register("tiled_products", _products, _differentiate_products, _no_products)


def add_product(total: Tensor, a: Tensor, b: Tensor, add: bool) -> None:
    """Write aᵀ b to `total` in at least fp32, or add it there; nothing is rounded to the dtype of a and b."""
    a = a.T
    if b.dtype != total.dtype and b.is_cpu:  # the CPU has no product with an fp32 output
        a, b = a.float(), b.float()
    if b.dtype == total.dtype:
        torch.addmm(total, a, b, beta=int(add), out=total)
    elif add:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        torch.mm(a, b, out_dtype=total.dtype, out=total)


class Arguments(NamedTuple):
    x: Tensor  # [M,I]
    weight: Tensor  # [O,I]
    bias: Tensor | None  # [O]
    how: str


def _empty(args: Arguments) -> tuple[Tensor]:
    return (new(args.x, len(args.x), len(args.weight)),)


def _compute(args: Arguments) -> tuple[Tensor]:
    (y,) = _empty(args)
    product(args.x, args.weight.T, y, args.how)
    return (y if args.bias is None else y.add_(args.bias),)


def _differentiate(args: Arguments, needed: Any, dy: Tensor) -> Gradients:
    x, weight, bias, how = args
    dy = dy.contiguous()
    return {
        "x": product(dy, weight, new(x, *x.shape), how) if needed.x else None,
        "weight": product(dy.T, x, new(weight, *weight.shape), how, divide=True) if needed.weight else None,
        "bias": dy.sum(0) if bias is not None and needed.bias else None,
    }


tiled_linear = register("tiled_linear", _compute, _differentiate, _empty)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + bias […,O] of x […,I]: PyTorch's product, or in deterministic mode with fixed tiles."""
    if not is_deterministic():
        if bias is None or x.dim() < 3 or x.is_contiguous():
            return F.linear(x, weight, bias)
        # of columns of a projection, PyTorch would add the bias in another pass over the result
        return F.linear(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])
    if (dtype := autocast_dtype(x.device)) is not None and x.dtype != torch.float64:
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if x.dtype != weight.dtype or (bias is not None and bias.dtype != x.dtype):
        return F.linear(x, weight, bias)  # which refuses them
    y = tiled_linear(x.flatten(0, -2) if x.dim() > 1 else x[None], weight, bias, implementation(x))
    return y.view(*x.shape[:-1], len(weight))
