"""Gates of all steps in one launch, and their gradients in another, for `delta_gates` and `discretise`."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from functools import reduce
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.allocation import new
from ...core.autograd import Gradients, register
from ...gpu.launch import cdiv, enqueue, next_power_of_2
from ...gpu.reductions import add_parts
from ...gpu.rows import load, per_channel, rows_of, shifted, tile_of, walkers
from .. import GateInputs

ELEMENTS = 1024  # per tile of rows
PROGRAMS = 4  # per multiprocessor in the backward pass; each stores its part of the parameters' gradients


@triton.jit
def softplus(x):
    return tl.log(1 + tl.exp(-tl.abs(x))) + tl.maximum(x, 0.0)


@triton.jit(do_not_specialize=["rows", "before"])
def gates_forward(
    a,
    A_log,
    dt_bias,
    b,
    bias,
    log_decay,
    second,  # β, or dt without b
    rows,
    a_row,
    b_row,
    largest,
    before,  # number of programs that do other work, which come first; None for none
    M: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program, m = tl.program_id(0), tl.arange(0, BLOCK)
    if before is not None:
        program -= before
    in_a, dense, inside = tile_of(program * ROWS, rows, a_row, m, M, ROWS)
    step = softplus(shifted(a, dt_bias, in_a, inside, m, M))
    if b is None:
        tl.store(second + dense, step, mask=inside)
    tl.store(log_decay + dense, -tl.exp(per_channel(A_log, m, M)) * step, mask=inside)
    if b is not None:
        in_b = tile_of(program * ROWS, rows, b_row, m, M, ROWS)[0]
        tl.store(second + dense, largest * tl.sigmoid(shifted(b, bias, in_b, inside, m, M)), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def gates_backward(
    a,
    A_log,
    dt_bias,
    b,
    bias,
    dlog_decay,
    dsecond,
    da,
    db,
    parts,  # [programs,M,2 or 3]: gradients of A_log, dt_bias and with b of bias, to be summed over the programs
    rows,
    a_row,
    b_row,
    largest,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    m = tl.arange(0, BLOCK)
    rate = -tl.exp(per_channel(A_log, m, M))
    from_rate, from_step = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
    from_bias = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        in_a, dense, inside = tile_of(first, rows, a_row, m, M, ROWS)
        x = shifted(a, dt_bias, in_a, inside, m, M)
        dx = tl.zeros([ROWS, BLOCK], tl.float32)
        if dlog_decay is not None:
            dx = load(dlog_decay, dense, inside) * rate
            from_rate += dx * softplus(x)
        if b is None and dsecond is not None:
            dx += load(dsecond, dense, inside)
        dx *= tl.sigmoid(x)
        from_step += dx
        tl.store(da + dense, dx.to(da.dtype.element_ty), mask=inside)
        if b is not None:
            dx = tl.zeros([ROWS, BLOCK], tl.float32)
            if dsecond is not None:
                in_b = tile_of(first, rows, b_row, m, M, ROWS)[0]
                share = tl.sigmoid(shifted(b, bias, in_b, inside, m, M))
                dx = load(dsecond, dense, inside) * largest * share * (1 - share)
                from_bias += dx
            tl.store(db + dense, dx.to(db.dtype.element_ty), mask=inside)
    PARTS: tl.constexpr = 2 if b is None else 3
    at = parts + (tl.program_id(0) * M + m) * PARTS
    tl.store(at, tl.sum(from_rate, 0), mask=m < M)
    tl.store(at + 1, tl.sum(from_step, 0), mask=m < M)
    if b is not None:
        tl.store(at + 2, tl.sum(from_bias, 0), mask=m < M)


def tile(size: int) -> dict[str, int]:
    """The constants of both kernels: recurrences, and rows and columns of a tile."""
    block = next_power_of_2(size)
    return {"M": size, "ROWS": max(1, ELEMENTS // block), "BLOCK": block}


class Arguments(NamedTuple):
    a: Tensor  # […,M]
    A_log: Tensor  # [M]
    dt_bias: Tensor
    b: Tensor | None  # as a
    bias: Tensor | None
    largest: float


def strided(args: Arguments) -> tuple[tuple[Tensor | None, ...], tuple[Any, ...]]:
    """The tensors that kernels read, and their numbers."""
    a, rows, a_row = rows_of(args.a)
    b, _, b_row = (None, 0, 0) if args.b is None else rows_of(args.b)
    return (a, args.A_log, args.dt_bias, b, args.bias), (rows, a_row, b_row, args.largest)


def _empty(args: Arguments) -> tuple[Tensor, Tensor]:
    return new(args.a, dtype=torch.float32), new(args.a, dtype=torch.float32)


def _compute(args: Arguments) -> tuple[Tensor, Tensor]:
    """log_decay, and β or without b dt."""
    outputs, sizes, (tensors, numbers) = _empty(args), tile(args.a.shape[-1]), strided(args)
    enqueue(gates_forward, cdiv(numbers[0], sizes["ROWS"]), *tensors, *outputs, *numbers, None, **sizes)
    return outputs


def _differentiate(args: Arguments, needed: Any, *gradients: Tensor | None) -> Gradients:
    arriving, sizes = [None if g is None else g.contiguous() for g in gradients], tile(args.a.shape[-1])
    da, db = new(args.a), None if args.b is None else new(args.b)
    tensors, numbers = strided(args)
    programs = walkers(numbers[0], sizes["ROWS"], da.device, PROGRAMS)
    parts = new(da, programs, sizes["M"], 2 if db is None else 3, dtype=torch.float32)
    enqueue(gates_backward, programs, *tensors, *arriving, da, db, parts, *numbers, **sizes)
    learned = {name: x for name in ("A_log", "dt_bias", "bias") if (x := getattr(args, name)) is not None}
    sums = add_parts(parts, reduce(torch.promote_types, (x.dtype for x in learned.values())))
    return {"a": da, "b": db, **{name: g.to(x.dtype) for (name, x), g in zip(learned.items(), sums, strict=False)}}


gates = register("delta_gates", _compute, _differentiate, _empty, results=2)


def forward(inputs: GateInputs) -> tuple[Tensor, Tensor]:
    """The log decay and β of all steps."""
    bias = None if inputs.bias is None else inputs.bias.contiguous()
    log_decay, beta = gates(
        inputs.a, inputs.A_log.contiguous(), inputs.dt_bias.contiguous(), inputs.b, bias, inputs.largest
    )
    return log_decay, beta


def discretise(a: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """The log decay and dt of all steps."""
    log_decay, dt = gates(a, A_log.contiguous(), dt_bias.contiguous(), None, None, 1.0)
    return log_decay, dt
