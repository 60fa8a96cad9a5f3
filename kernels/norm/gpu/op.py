"""RMS normalisation and LayerNorm in Triton: one launch forward and one backward, which saves only the arguments."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.allocation import new
from ...core.autograd import Gradients, once, register
from ...core.recompute import remake
from ...gpu.launch import LaunchSpec, cdiv, next_power_of_2
from ...gpu.overlap import MOST_EARLY
from ...gpu.reductions import add_parts
from ...gpu.rows import walkers
from .. import dtype_of
from ..composition import Arguments
from . import kernels

ELEMENTS = 1024  # per tile of short rows
PER_WARP, MOST_WARPS = 512, 16


class Walk(NamedTuple):
    """Programs of the backward pass, which walk over the rows. Each stores a part of the weight's gradient."""

    programs: int  # on a multiprocessor
    stages: int  # of the pipeline that loads tiles


SHORT = 1024  # numbers of a row
LONG = 8192  # bytes of a row, up to which three stages have room in the shared memory of any GPU


def walk(size: int, row: int, gated: bool) -> Walk:
    """Return the fastest walk over rows of `size` numbers and `row` bytes, measured in bf16 on an H200."""
    if not gated:
        return Walk(8, 3) if size <= SHORT else Walk(12, 1)
    if size <= SHORT:
        return Walk(8, 2)
    return Walk(8, 3) if row <= LONG else Walk(6, 1)


def inner(x: Tensor) -> int:
    """Number of contiguous rows of x […,D]: the heads of a token."""
    return x.shape[-2] if x.dim() > 3 else 1


def strided(x: Tensor) -> tuple[Tensor, int]:
    """x […,D], contiguous except for its outer axes (as the heads of a part of a projection are), and their stride."""
    if not x.is_contiguous() and x.dim() > 1:
        flat = x.flatten(0, -3) if x.dim() > 3 else x.flatten(0, -2).unsqueeze(1)
        if flat.stride(2) == 1 and (flat.shape[1] == 1 or flat.stride(1) == flat.shape[2]):
            return flat, flat.stride(0)
    return x.contiguous(), inner(x) * x.shape[-1]


@lru_cache(maxsize=1024)
def launch(
    device: torch.device | None,
    rows: int,
    inner: int,
    size: int,
    gate: str,
    activation: str,
    *numbers: Any,
    widest: int = 0,
) -> LaunchSpec:
    """The launch for `rows` rows; `numbers` are the strides of x and of the gate, and eps.

    Forward, `device` is None. The backward pass depends on it and, with a gate, on `widest`, the size in bytes of the
    widest input's numbers.
    """
    block = next_power_of_2(size)
    tile = max(1, ELEMENTS // block)
    fixed: dict[str, Any] = {"INNER": inner, "D": size, "ROWS": tile, "BLOCK": block}
    fixed |= {"GATE": gate, "ACTIVATION": activation}
    fixed["warps"] = max(1, min(tile * block // PER_WARP, MOST_WARPS))
    if device is None:
        programs = cdiv(rows, tile)
        return LaunchSpec(kernels.forward, programs, rows, *numbers, **fixed, overlap=programs <= MOST_EARLY)
    each, stages = walk(size, size * widest, gate != "none")
    return LaunchSpec(kernels.backward, walkers(rows, tile, device, each), rows, *numbers, **fixed, STAGES=stages)


def sizes(args: Arguments) -> tuple[int, int, int, str, str]:
    """Rows, inner rows, row size, the position of the gate (none, first, before the norm, or last), its activation."""
    x = args.x
    gate = "none" if args.gate is None else "first" if args.gate_first else "last"
    return x.numel() // max(x.shape[-1], 1), inner(x), x.shape[-1], gate, args.activation


def _compute(args: Arguments) -> tuple[Tensor]:
    x, gate, weight, bias, eps, *_, dtype = args
    y = new(x, dtype=dtype)
    weight, bias = (None if z is None else z.contiguous() for z in (weight, bias))
    (x, outer), (gate, gate_outer) = strided(x), (None, 0) if gate is None else strided(gate)
    launch(None, *sizes(args), outer, gate_outer, eps)(x, gate, weight, bias, None, y, None)
    return (y,)


def differentiate_rows(
    args: Arguments, dy: Tensor, dtotal: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x (with `dtotal` added), of the gate, of the weight and of the bias."""
    x, gate, weight, bias, eps, *_ = args
    dtotal = None if dtotal is None else dtotal.contiguous()
    weight = None if weight is None else weight.contiguous()
    dx, dgate = new(x), None if gate is None else new(gate)
    (x, x_outer), (gate, gate_outer) = strided(x), (None, 0) if gate is None else strided(gate)
    widest = 0 if gate is None else max(each.element_size() for each in (x, gate, dy))
    queue = launch(x.device, *sizes(args), x_outer, gate_outer, eps, widest=widest)
    learned = [z for z in (weight, bias) if z is not None]
    parts = new(x, queue.programs, 1, len(learned) * x.shape[-1], dtype=torch.float32) if learned else None
    queue(x, gate, weight, bias, dy.contiguous(), dtotal, dx, dgate, parts)
    sums = [] if parts is None else add_parts(parts, learned[0].dtype).view(len(learned), -1).unbind()
    dweight, dbias, *_ = *(total.to(z.dtype) for total, z in zip(sums, learned, strict=True)), None, None
    return dx, dgate, dweight, dbias


def _differentiate(args: Arguments, needed: Any, dy: Tensor) -> Gradients:
    return dict(zip(("x", "gate", "weight", "bias"), differentiate_rows(args, dy), strict=True))


forward = register("rms_norm", _compute, _differentiate, lambda args: (new(args.x, dtype=args.dtype),))


class Added(torch.autograd.Function):
    """x + y and its norm, in one launch each way. Only the sum is saved; its gradient is that of both terms.

    For eager calls only: a compiler fuses the sum and the norm automatically.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        rows, total, h = x.numel() // max(x.shape[-1], 1), new(x), new(x, dtype=dtype)
        queue = launch(None, rows, 1, x.shape[-1], "none", "silu", x.shape[-1], 0, eps)
        learned = (None if z is None else z.contiguous() for z in (weight, bias))
        queue(x.contiguous(), None, *learned, y.contiguous(), h, total)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(total, weight, bias)
        ctx.eps, ctx.other = eps, y.dtype
        return total, h

    @staticmethod
    @once
    def backward(ctx: Any, dtotal: Tensor | None, dh: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight, bias = ctx.saved_tensors
        if dh is None:
            return dtotal, None if dtotal is None else dtotal.to(ctx.other), None, None, None, None
        args = Arguments(total, None, weight, bias, ctx.eps, gate_first=False, activation="silu", dtype=dh.dtype)
        dx, _, dweight, dbias = differentiate_rows(args, dh, dtotal)
        return dx, dx.to(ctx.other), dweight, dbias, None, None


def added(x: Tensor, y: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """The sum and its norm in one launch."""
    dtype = dtype_of(x)
    total, h = Added.apply(x, y, weight, bias, eps, dtype)
    return total, remake(h, forward, total, None, weight, bias, eps, False, "silu", dtype)
