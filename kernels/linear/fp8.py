"""`fp8`: matrix products in FP8 with a scale for each row of both factors, forward and backward.

Inside ``with fp8():`` the products of `linear` and `gated_linear` whose weight has at least `SMALLEST` inputs and
outputs are computed in e4m3, the 8-bit format with three bits of mantissa: y = x Wᵀ, dx = dy W and dW = dyᵀ x. Each row
of a factor, along the axis that is summed over, is divided by its largest magnitude / 448 in the call itself. Weights
and their gradients keep their dtype. Gradients are in e4m3, too: e5m2 has more range, which rows with a scale each do
not need, and one bit of mantissa less.

The scope is that of `deterministic`: the thread that entered the block, and the backward passes of calls inside it.

PyTorch's `scaled_mm` multiplies. torchao, which has a training recipe with these scales, replaces modules by its class
of linear layers, which has no named outputs, and relies on torch.compile to fuse the scaling; here a Triton kernel does
that.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.allocation import new
from ..core.autocast import autocast_dtype
from ..core.autograd import Gradients, register
from ..core.backend import Op
from ..core.deterministic import is_deterministic
from ..core.scope import scope
from ..errors import UserError

FORMAT = torch.float8_e4m3fn
LARGEST = 448.0  # of the format
SMALLEST = 256  # inputs and outputs: below, scaling takes longer than FP8 saves, and gates of heads are below
UNIT = 16  # sizes of products in FP8 are multiples of it
FLOOR = 1e-30  # of a row's largest magnitude, so that rows of zeros stay zeros
CAPABILITY = (8, 9)  # of the first NVIDIA GPUs with units for FP8: Ada and Hopper
_mode: ContextVar[bool] = ContextVar("fp8", default=False)


@contextmanager
def fp8(enabled: bool = True) -> Iterator[None]:
    """Inside the ``with`` block, large matrix products of `linear` and `gated_linear` run in FP8.

    >>> with kernels.fp8():
    ...     y = kernels.linear(x, weight)

    Args:
        enabled: Whether they do; False turns it off inside the block.
    """
    with scope(_mode, enabled):
        yield


def is_fp8() -> bool:
    """Return whether `fp8` is in force."""
    return _mode.get()


def in_fp8(inputs: int, outputs: int) -> bool:
    """Return whether a linear map of these sizes runs in FP8 here."""
    return is_fp8() and min(inputs, outputs) >= SMALLEST


@cache
def check_device(device: torch.device) -> None:
    """Raise a UserError if a device cannot multiply in FP8. A CPU can, slowly, to try a setting out."""
    if device.type in ("cpu", "meta"):
        return
    if device.type != "cuda" or torch.version.hip is not None:
        raise UserError(f"fp8: true needs an NVIDIA GPU, or a CPU to try it out, not {device.type}")
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        raise UserError(
            f"fp8: true needs an NVIDIA GPU of compute capability 8.9 or more (Ada, Hopper and newer), and the "
            f"{torch.cuda.get_device_name(device)} has {'.'.join(map(str, capability))}"
        )


def scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M,K] as contiguous e4m3 numbers, and the scale [M,1] in fp32 of each row; in PyTorch."""
    wide = x.float()
    scale = wide.abs().amax(1, keepdim=True).clamp(min=FLOOR) / LARGEST
    return (wide * (1 / scale)).to(FORMAT).contiguous(), scale


def reference(a: Tensor, b: Tensor) -> Tensor:
    """The formula in fp32, of numbers that were rounded to FP8."""
    (a, rows), (b, columns) = scaled(a), scaled(b.mT)
    return ((a.float() * rows) @ (b.float() * columns).mT).bfloat16()


def multiplied(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
    """The product [M,N] in bf16 of scaled matrices: a [M,K], and b [N,K], the transposed second factor."""
    # Without fast accumulation, Hopper adds up in fp32 after every 128 numbers, at the cost of most of the speed.
    return F.scaled_mm(
        a[0],
        b[0].mT,
        a[1],
        F.ScalingType.RowWise,
        b[1].mT,
        F.ScalingType.RowWise,
        output_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def in_torch(a: Tensor, b: Tensor) -> Tensor:
    """The product of factors that PyTorch scales."""
    return multiplied(scaled(a), scaled(b.mT))


# a [M,K], b [K,N] → [M,N] in bf16; either may be a transposed view
PRODUCT = Op("fp8_product", reference=reference, torch=in_torch, gpu="kernels.linear.gpu.fp8:product")


def implementation(x: Tensor, weight: Tensor) -> str:
    """The implementation of FP8 products for x […,I] and a weight [O,I], which the backward pass follows.

    Raises:
        UserError: The device has no FP8, a size is not a multiple of `UNIT`, or the mode is `deterministic`.
    """
    check_device(x.device)
    if is_deterministic():
        raise UserError("fp8: true does not cover kernels.deterministic, where products have tiles of a fixed size")
    rows, (outputs, inputs) = x.numel() // max(x.shape[-1], 1), weight.shape
    if rows % UNIT:
        raise UserError(f"fp8: {rows} tokens in a batch are not a multiple of {UNIT}, as FP8 products need them")
    if inputs % UNIT or outputs % UNIT:
        raise UserError(f"fp8: a linear map of {inputs} to {outputs} channels; both must be multiples of {UNIT}")
    return PRODUCT.backend(x)


def product(a: Tensor, b: Tensor, how: str) -> Tensor:
    """Return a [M,K] times b [K,N] in the dtype of a, for the code of ops: without gradients."""
    y: Tensor = PRODUCT.load(how)(a, b)
    return y.to(a.dtype)


class Arguments(NamedTuple):
    x: Tensor  # [M,I]
    weight: Tensor  # [O,I], in any dtype
    bias: Tensor | None  # [O]
    how: str  # implementation of the products


def _empty(args: Arguments) -> tuple[Tensor]:
    return (new(args.x, len(args.x), len(args.weight)),)


def _compute(args: Arguments) -> tuple[Tensor]:
    y = product(args.x, args.weight.T, args.how)
    return (y if args.bias is None else y.add_(args.bias),)


def _differentiate(args: Arguments, needed: Any, dy: Tensor) -> Gradients:
    x, weight, bias, how = args
    dy = dy.contiguous()
    return {
        "x": product(dy, weight, how) if needed.x else None,
        "weight": product(dy.T, x, how).to(weight.dtype) if needed.weight else None,
        "bias": dy.sum(0).to(bias.dtype) if bias is not None and needed.bias else None,
    }


fp8_linear = register("fp8_linear", _compute, _differentiate, _empty)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + bias […,O] of x […,I], in FP8; in the dtype of x, or of autocast where that is on.

    Raises:
        UserError: As `implementation`.
    """
    how = implementation(x, weight)
    if (dtype := autocast_dtype(x.device)) is not None:
        x = x.to(dtype)
    y = fp8_linear(x.flatten(0, -2), weight, bias, how)
    return y.view(*x.shape[:-1], len(weight))


# as in `backend.py`: the compiler cannot trace a context variable
is_fp8._dynamo_marked_constant = True  # type: ignore[attr-defined]
