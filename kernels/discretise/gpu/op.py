"""The decays of all steps in one launch, and their gradients in another."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.allocation import new
from ...core.autograd import Gradients, register
from ...gpu.device import multiprocessors
from ...gpu.launch import cdiv, enqueue, next_power_of_2
from ...gpu.reductions import add_parts

ELEMENTS = 1024  # per tile of rows
PROGRAMS = 4  # per multiprocessor in the backward pass; each stores its part of the parameters' gradients


@triton.jit
def tile_of(first, rows, a_row, M: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Offsets of the rows from `first` on, in `a` and in dense tensors, and the mask of those that exist."""
    r, m = (first + tl.arange(0, ROWS))[:, None].to(tl.int64), tl.arange(0, BLOCK)[None, :]
    return r * a_row + m, r * M + m, (r < rows) & (m < M)


@triton.jit
def softplus(x):
    return tl.log(1 + tl.exp(-tl.abs(x))) + tl.maximum(x, 0.0)


@triton.jit
def per_recurrence(x, M: tl.constexpr, BLOCK: tl.constexpr):
    m = tl.arange(0, BLOCK)
    return tl.load(x + m, mask=m < M, other=0.0).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["rows"])
def discretise_forward(
    a, A_log, dt_bias, log_decay, dt, rows, a_row, M: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    in_a, dense, inside = tile_of(tl.program_id(0) * ROWS, rows, a_row, M, ROWS, BLOCK)
    step = softplus(tl.load(a + in_a, mask=inside, other=0.0).to(tl.float32) + per_recurrence(dt_bias, M, BLOCK))
    tl.store(dt + dense, step, mask=inside)
    tl.store(log_decay + dense, -tl.exp(per_recurrence(A_log, M, BLOCK)) * step, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def discretise_backward(
    a,
    A_log,
    dt_bias,
    dlog_decay,
    ddt,
    da,
    parts,  # [programs,M,2]: gradients of A_log and dt_bias, to be summed over the programs
    rows,
    a_row,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DECAY: tl.constexpr,
    DT: tl.constexpr,
):
    rate, bias = -tl.exp(per_recurrence(A_log, M, BLOCK)), per_recurrence(dt_bias, M, BLOCK)
    from_rate, from_bias = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
    for first in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        in_a, dense, inside = tile_of(first, rows, a_row, M, ROWS, BLOCK)
        x = tl.load(a + in_a, mask=inside, other=0.0).to(tl.float32) + bias
        dx = tl.zeros([ROWS, BLOCK], tl.float32)
        if DECAY:
            d = tl.load(dlog_decay + dense, mask=inside, other=0.0).to(tl.float32) * rate
            from_rate += d * softplus(x)
            dx += d
        if DT:
            dx += tl.load(ddt + dense, mask=inside, other=0.0).to(tl.float32)
        dx *= tl.sigmoid(x)
        from_bias += dx
        tl.store(da + dense, dx.to(da.dtype.element_ty), mask=inside)
    m = tl.arange(0, BLOCK)
    at = parts + (tl.program_id(0) * M + m) * 2
    tl.store(at, tl.sum(from_rate, 0), mask=m < M)
    tl.store(at + 1, tl.sum(from_bias, 0), mask=m < M)


def tile(size: int) -> dict[str, int]:
    """The constants of both kernels: recurrences, and rows and columns of a tile."""
    block = next_power_of_2(size)
    return {"M": size, "ROWS": max(1, ELEMENTS // block), "BLOCK": block}


def rows_of(a: Tensor) -> tuple[Tensor, int, int]:
    """a […,M] with the recurrences of a row contiguous, the number of rows, and their stride."""
    rows, size = a.numel() // max(a.shape[-1], 1), a.shape[-1]
    if not a.is_contiguous():
        a = a.flatten(0, -2)
        if a.stride(1) == 1:
            return a, rows, a.stride(0)
    return a.contiguous(), rows, size


class Arguments(NamedTuple):
    """Arguments of the op, which `discretise` explains."""

    a: Tensor
    A_log: Tensor
    dt_bias: Tensor


def compute(args: Arguments) -> tuple[Tensor, Tensor]:
    """log_decay and dt, in the shape of a […,M]."""
    a, A_log, dt_bias = args
    (log_decay, dt), sizes = (new(a, dtype=torch.float32) for _ in range(2)), tile(a.shape[-1])
    a, rows, a_row = rows_of(a)
    enqueue(discretise_forward, cdiv(rows, sizes["ROWS"]), a, A_log, dt_bias, log_decay, dt, rows, a_row, **sizes)
    return log_decay, dt


def fake(args: Arguments) -> tuple[Tensor, Tensor]:
    """Empty tensors of the shapes and dtypes that `compute` returns."""
    a = args.a
    return a.new_empty(a.shape, dtype=torch.float32), a.new_empty(a.shape, dtype=torch.float32)


def differentiate(
    gradients: Sequence[Tensor | None], residuals: Sequence[Tensor], needed: Any, args: Arguments
) -> Gradients:
    """The gradients of all tensors."""
    a, A_log, dt_bias = args
    dlog_decay, ddt = (None if g is None else g.contiguous() for g in gradients)
    sizes, da = tile(a.shape[-1]), new(a)
    a, rows, a_row = rows_of(a)
    programs = min(cdiv(rows, sizes["ROWS"]), multiprocessors(a.device) * PROGRAMS)
    parts = new(a, programs, sizes["M"], 2, dtype=torch.float32)
    tensors = (a, A_log, dt_bias, dlog_decay, ddt, da, parts)
    options = {**sizes, "DECAY": dlog_decay is not None, "DT": ddt is not None}
    enqueue(discretise_backward, programs, *tensors, rows, a_row, **options)
    dA_log, ddt_bias = add_parts(parts, torch.promote_types(A_log.dtype, dt_bias.dtype))
    return {"a": da, "A_log": dA_log.to(A_log.dtype), "dt_bias": ddt_bias.to(dt_bias.dtype)}


discretise = register("discretise", compute, differentiate, fake, results=2)


def forward(a: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """log_decay and dt, in the shape of a."""
    log_decay, dt = discretise(a, A_log.contiguous(), dt_bias.contiguous())
    return log_decay, dt
