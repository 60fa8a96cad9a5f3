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
from ...gpu.rows import load, per_channel, row_stride, rows_of, shifted, tile_of, walkers
from ...gpu.tiles import log1p_exp
from .. import GateInputs

ELEMENTS = 1024  # per tile of rows
PROGRAMS = 4  # per multiprocessor in the backward pass; each stores its part of the parameters' gradients


@triton.jit
def softplus(x):
    return tl.maximum(x, 0.0) + log1p_exp(x)


@triton.jit
def decay_of(x, rate, lower, BOUNDED: tl.constexpr):
    """The log decay of x = a + dt_bias and rate = exp(A_log)."""
    return lower * tl.sigmoid(rate * x) if BOUNDED else -rate * softplus(x)


@triton.jit(do_not_specialize=["rows", "before"])
def gates_forward(
    a,
    A_log,
    dt_bias,
    b,
    bias,
    log_decay,
    second,  # β, or dt without b; None if neither is needed
    rows,
    a_row,
    b_row,
    largest,
    lower,  # bound of the log decays if they are bounded
    before,  # number of programs that do other work, which come first; None for none
    M: tl.constexpr,  # decays of a step
    SIZE: tl.constexpr,  # of these, for each recurrence
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    program, m = tl.program_id(0), tl.arange(0, BLOCK)
    if before is not None:
        program -= before
    in_a, dense, inside = tile_of(program * ROWS, rows, a_row, m, M, ROWS)
    x, rate = shifted(a, dt_bias, in_a, inside, m, M), tl.exp(per_channel(A_log, m // SIZE, M // SIZE))
    tl.store(log_decay + dense, decay_of(x, rate, lower, BOUNDED), mask=inside)
    if b is not None:
        h = tl.arange(0, HEAD_BLOCK)
        in_b, of_heads, heads = tile_of(program * ROWS, rows, b_row, h, M // SIZE, ROWS)
        strength = largest * tl.sigmoid(shifted(b, bias, in_b, heads, h, M // SIZE))
        tl.store(second + of_heads, strength, mask=heads)
    elif second is not None:
        tl.store(second + dense, softplus(x), mask=inside)


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
    parts,  # [programs,…]: gradients of A_log [M], dt_bias [M] and with b of bias [M // SIZE], to be summed
    rows,
    a_row,
    b_row,
    largest,
    lower,
    da_row,
    db_row,
    M: tl.constexpr,  # decays of a step
    SIZE: tl.constexpr,  # of these, for each recurrence
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    m, h = tl.arange(0, BLOCK), tl.arange(0, HEAD_BLOCK)
    rate = tl.exp(per_channel(A_log, m // SIZE, M // SIZE))
    from_rate, from_step = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
    from_bias = tl.zeros([ROWS, HEAD_BLOCK], tl.float32)
    for first in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        in_a, dense, inside = tile_of(first, rows, a_row, m, M, ROWS)
        x = shifted(a, dt_bias, in_a, inside, m, M)
        dx = tl.zeros([ROWS, BLOCK], tl.float32)
        if dlog_decay is not None:
            g = load(dlog_decay, dense, inside)
            if BOUNDED:
                share = tl.sigmoid(rate * x)
                dx = g * lower * share * (1 - share) * rate
                from_rate += dx * x
            else:
                dx = -g * rate * tl.sigmoid(x)
                from_rate -= g * rate * softplus(x)
        if b is None and dsecond is not None:
            dx += load(dsecond, dense, inside) * tl.sigmoid(x)
        from_step += dx
        in_da, _, _ = tile_of(first, rows, da_row, m, M, ROWS)
        tl.store(da + in_da, dx.to(da.dtype.element_ty), mask=inside)
        if b is not None:
            of_b = tl.zeros([ROWS, HEAD_BLOCK], tl.float32)
            in_b, of_heads, heads = tile_of(first, rows, b_row, h, M // SIZE, ROWS)
            if dsecond is not None:
                share = tl.sigmoid(shifted(b, bias, in_b, heads, h, M // SIZE))
                of_b = load(dsecond, of_heads, heads) * largest * share * (1 - share)
                from_bias += of_b
            in_db, _, _ = tile_of(first, rows, db_row, h, M // SIZE, ROWS)
            tl.store(db + in_db, of_b.to(db.dtype.element_ty), mask=heads)
    PARTS: tl.constexpr = 2 * M if b is None else 2 * M + M // SIZE
    at = parts + tl.program_id(0) * PARTS
    tl.store(at + m, tl.sum(from_rate, 0), mask=m < M)
    tl.store(at + M + m, tl.sum(from_step, 0), mask=m < M)
    if b is not None:
        tl.store(at + 2 * M + h, tl.sum(from_bias, 0), mask=h < M // SIZE)


def tile(dt_bias: Tensor, elements: int = ELEMENTS) -> dict[str, int]:
    """The constants of both kernels: numbers of decays, and rows and columns of a tile of `elements`."""
    M, block, heads = dt_bias.numel(), next_power_of_2(dt_bias.numel()), dt_bias.shape[0]
    rows = max(1, elements // block)
    return {"M": M, "SIZE": M // heads, "ROWS": rows, "BLOCK": block, "HEAD_BLOCK": next_power_of_2(heads)}


class Arguments(NamedTuple):
    a: Tensor  # […,M], or per channel […,M,K]
    A_log: Tensor  # [M]
    dt_bias: Tensor  # [M] or [M,K]
    b: Tensor | None  # […,M]
    bias: Tensor | None
    largest: float
    lower: float  # bound of the log decays; 0 for none


def _rows(args: Arguments, a: Tensor) -> Tensor:
    """Return a, or its gradient, with the channels of all heads along one axis."""
    return a if args.dt_bias.dim() == 1 else a.flatten(-2)


def strided(args: Arguments) -> tuple[tuple[Tensor | None, ...], tuple[Any, ...]]:
    """The tensors that kernels read, and their numbers."""
    a, rows, a_row = rows_of(_rows(args, args.a))
    b, _, b_row = (None, 0, 0) if args.b is None else rows_of(args.b)
    return (a, args.A_log, args.dt_bias, b, args.bias), (rows, a_row, b_row, args.largest, args.lower)


def constants(args: Arguments) -> dict[str, Any]:
    """The constants of a launch."""
    return {**tile(args.dt_bias), "BOUNDED": args.lower != 0}


def nothing_second(args: Arguments) -> bool:
    """Return whether the second result is empty: without β, and for decays per channel, whose dt nothing reads."""
    return args.b is None and args.dt_bias.dim() > 1


def _empty(args: Arguments) -> tuple[Tensor, Tensor]:
    second = args.a.shape if args.b is None else args.b.shape
    if nothing_second(args):
        second = torch.Size([0])
    return new(args.a, dtype=torch.float32), new(args.a, *second, dtype=torch.float32)


def compute(args: Arguments) -> tuple[Tensor, Tensor]:
    """log_decay, and β; without b dt, or for decays per channel nothing."""
    (log_decay, second), sizes, (tensors, numbers) = _empty(args), constants(args), strided(args)
    stored = None if nothing_second(args) else second
    enqueue(gates_forward, cdiv(numbers[0], sizes["ROWS"]), *tensors, log_decay, stored, *numbers, None, **sizes)
    return log_decay, second


def differentiate(
    args: Arguments,
    needed: Any,
    of_decay: Tensor | None,
    of_second: Tensor | None,
    da: Tensor | None = None,
    db: Tensor | None = None,
) -> Gradients:
    """The gradients of all tensors; those of a and b are written to `da` and `db`, if these are given."""
    gradients = of_decay, None if nothing_second(args) else of_second
    arriving, sizes = [None if g is None else g.contiguous() for g in gradients], constants(args)
    da, db = new(args.a) if da is None else da, new(args.b) if db is None and args.b is not None else db
    da_row, db_row = row_stride(_rows(args, da)), 0 if db is None else row_stride(db)
    tensors, numbers = strided(args)
    programs = walkers(numbers[0], sizes["ROWS"], da.device, PROGRAMS)
    M, heads = sizes["M"], args.dt_bias.shape[0]
    lengths = [M, M] if db is None else [M, M, heads]
    parts = new(da, programs, 1, sum(lengths), dtype=torch.float32)
    enqueue(gates_backward, programs, *tensors, *arriving, da, db, parts, *numbers, da_row, db_row, **sizes)
    learned = {name: x for name in ("A_log", "dt_bias", "bias") if (x := getattr(args, name)) is not None}
    sums = add_parts(parts, reduce(torch.promote_types, (x.dtype for x in learned.values()))).flatten()
    rates, *rest = sums.split(lengths)
    every = zip(learned.items(), (rates if heads == M else rates.view(heads, -1).sum(1), *rest), strict=False)
    return {"a": da, "b": db, **{name: g.view(x.shape).to(x.dtype) for (name, x), g in every}}


gates = register("delta_gates", compute, differentiate, _empty, results=2)


def arguments(inputs: GateInputs) -> Arguments:
    """The arguments of the op, without the product with `up`."""
    bias = None if inputs.bias is None else inputs.bias.contiguous()
    learned = inputs.A_log.contiguous(), inputs.dt_bias.contiguous()
    return Arguments(inputs.a, *learned, inputs.b, bias, inputs.largest, inputs.lower)


def forward(inputs: GateInputs) -> tuple[Tensor, Tensor | None]:
    """The log decay and β of all steps."""
    log_decay, beta = gates(*arguments(inputs.multiplied()))
    return log_decay, None if inputs.b is None else beta


def discretise(a: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """The log decay and dt of all steps."""
    log_decay, dt = gates(a, A_log.contiguous(), dt_bias.contiguous(), None, None, 1.0, 0.0)
    return log_decay, dt
