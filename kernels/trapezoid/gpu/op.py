"""The gates in one launch, and the gradients of all arguments in another of the same kernel."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.allocation import new
from ...core.autograd import Gradients, register
from ...delta_gates.gpu.op import softplus
from ...gpu.launch import cdiv, enqueue, next_power_of_2
from ...gpu.reductions import add_parts
from ...gpu.rows import load, rows_of, shifted, tile_of
from .. import SLOWEST

ELEMENTS = 1024  # per tile of rows
LEAST = tl.constexpr(SLOWEST)


@triton.jit(do_not_specialize=["rows"])
def gates(
    a,
    r,
    w,
    dt_bias,
    log_decay,  # result or, like dt and share, its gradient; None for none
    dt,
    share,
    da,  # like all below, None for the results
    dr,
    dw,
    parts,  # [programs,M]: gradients of dt_bias, to be summed
    rows,
    a_row,
    r_row,
    w_row,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the results, or the gradients of the arguments if there is memory for them."""
    first, m = tl.program_id(0) * ROWS, tl.arange(0, BLOCK)
    in_a, dense, inside = tile_of(first, rows, a_row, m, M, ROWS)
    in_r, _, _ = tile_of(first, rows, r_row, m, M, ROWS)
    in_w, _, _ = tile_of(first, rows, w_row, m, M, ROWS)
    x, raw = shifted(a, dt_bias, in_a, inside, m, M), load(r, in_r, inside)
    step, opened = softplus(x), tl.sigmoid(load(w, in_w, inside))
    below = 1 / (1 - tl.minimum(raw, 0.0))
    rate = tl.where(raw >= 0, 1 + raw, below)
    bounded = tl.maximum(rate, LEAST)
    if da is None:
        tl.store(log_decay + dense, -bounded * step, mask=inside)
        tl.store(dt + dense, step, mask=inside)
        tl.store(share + dense, opened, mask=inside)
    else:
        of_step, of_rate, of_share = tl.zeros_like(x), tl.zeros_like(x), tl.zeros_like(x)
        if dt is not None:
            of_step += load(dt, dense, inside)
        if log_decay is not None:
            of_decay = load(log_decay, dense, inside)
            of_step -= of_decay * bounded
            slope = tl.where(raw >= 0, 1.0, below * below)
            of_rate = tl.where(rate >= LEAST, -of_decay * step * slope, 0.0)
        if share is not None:
            of_share = load(share, dense, inside) * opened * (1 - opened)
        of_step *= tl.sigmoid(x)
        tl.store(da + dense, of_step.to(da.dtype.element_ty), mask=inside)
        tl.store(dr + dense, of_rate.to(dr.dtype.element_ty), mask=inside)
        tl.store(dw + dense, of_share.to(dw.dtype.element_ty), mask=inside)
        tl.store(parts + tl.program_id(0).to(tl.int64) * M + m, tl.sum(of_step, 0), mask=m < M)


class Arguments(NamedTuple):
    a: Tensor  # […,M], like r and w
    r: Tensor
    w: Tensor
    dt_bias: Tensor  # [M]


def _tile(args: Arguments) -> dict[str, int]:
    """The constants of both passes."""
    M, block = len(args.dt_bias), next_power_of_2(len(args.dt_bias))
    return {"M": M, "ROWS": max(1, ELEMENTS // block), "BLOCK": block}


def _launch(args: Arguments, *tensors: Tensor | None) -> None:
    """Launch the kernel with its tensors after the arguments."""
    inputs, (rows, *_), strides = zip(*(rows_of(x) for x in args[:3]), strict=True)
    sizes, bias = _tile(args), args.dt_bias.contiguous()
    enqueue(gates, cdiv(rows, sizes["ROWS"]), *inputs, bias, *tensors, rows, *strides, **sizes)


def _empty(args: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(new(args.a, dtype=torch.float32) for _ in range(3))  # type: ignore[return-value]


def _compute(args: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    results = _empty(args)
    _launch(args, *results, *[None] * 4)
    return results


def _differentiate(args: Arguments, needed: Any, *arriving: Tensor | None) -> Gradients:
    gradients = {name: new(getattr(args, name)) for name in ("a", "r", "w")}
    programs, M = cdiv(args.a.numel() // len(args.dt_bias), _tile(args)["ROWS"]), len(args.dt_bias)
    parts = new(args.a, programs, 1, M, dtype=torch.float32)
    _launch(args, *(None if g is None else g.contiguous() for g in arriving), *gradients.values(), parts)
    return {**gradients, "dt_bias": add_parts(parts, args.dt_bias.dtype).view(-1)}


forward = register("trapezoid", _compute, _differentiate, _empty, results=3)
