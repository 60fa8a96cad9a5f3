"""Decay and β of all steps in one launch, and their gradients in another."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.allocation import new
from ...core.autograd import Gradients, register
from ...discretise.gpu.op import PROGRAMS, per_recurrence, rows_of, softplus, tile, tile_of
from ...gpu.device import multiprocessors
from ...gpu.launch import cdiv, enqueue
from ...gpu.reductions import add_parts
from .. import GateInputs


@triton.jit
def shifted(x, bias, at, inside, M: tl.constexpr, BLOCK: tl.constexpr):
    """x + bias in fp32."""
    wide = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        wide += per_recurrence(bias, M, BLOCK)
    return wide


@triton.jit
def gates_tile(
    a,
    A_log,
    dt_bias,
    b,
    bias,
    log_decay,
    beta,
    program,
    rows,
    a_row,
    b_row,
    largest,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = program * ROWS
    in_a, dense, inside = tile_of(first, rows, a_row, M, ROWS, BLOCK)
    step = softplus(shifted(a, dt_bias, in_a, inside, M, BLOCK))
    tl.store(log_decay + dense, -tl.exp(per_recurrence(A_log, M, BLOCK)) * step, mask=inside)
    in_b = tile_of(first, rows, b_row, M, ROWS, BLOCK)[0]
    tl.store(beta + dense, largest * tl.sigmoid(shifted(b, bias, in_b, inside, M, BLOCK)), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def gates_forward(
    a,
    A_log,
    dt_bias,
    b,
    bias,
    log_decay,
    beta,
    rows,
    a_row,
    b_row,
    largest,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    p = tl.program_id(0)
    gates_tile(a, A_log, dt_bias, b, bias, log_decay, beta, p, rows, a_row, b_row, largest, M, ROWS, BLOCK)


@triton.jit(do_not_specialize=["rows"])
def gates_backward(
    a,
    A_log,
    dt_bias,
    b,
    bias,
    dlog_decay,
    dbeta,
    da,
    db,
    parts,  # [programs,M,3]: gradients of A_log, dt_bias and bias, to be summed over the programs
    rows,
    a_row,
    b_row,
    largest,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rate = -tl.exp(per_recurrence(A_log, M, BLOCK))
    from_rate, from_step = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
    from_bias = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        in_a, dense, inside = tile_of(first, rows, a_row, M, ROWS, BLOCK)
        dx = tl.zeros([ROWS, BLOCK], tl.float32)
        if dlog_decay is not None:
            x = shifted(a, dt_bias, in_a, inside, M, BLOCK)
            dx = tl.load(dlog_decay + dense, mask=inside, other=0.0).to(tl.float32) * rate
            from_rate += dx * softplus(x)
            dx *= tl.sigmoid(x)
            from_step += dx
        tl.store(da + dense, dx.to(da.dtype.element_ty), mask=inside)
        dx = tl.zeros([ROWS, BLOCK], tl.float32)
        if dbeta is not None:
            in_b = tile_of(first, rows, b_row, M, ROWS, BLOCK)[0]
            share = tl.sigmoid(shifted(b, bias, in_b, inside, M, BLOCK))
            dx = tl.load(dbeta + dense, mask=inside, other=0.0).to(tl.float32) * largest * share * (1 - share)
            from_bias += dx
        tl.store(db + dense, dx.to(db.dtype.element_ty), mask=inside)
    m = tl.arange(0, BLOCK)
    at = parts + (tl.program_id(0) * M + m) * 3
    tl.store(at, tl.sum(from_rate, 0), mask=m < M)
    tl.store(at + 1, tl.sum(from_step, 0), mask=m < M)
    tl.store(at + 2, tl.sum(from_bias, 0), mask=m < M)


class Arguments(NamedTuple):
    """Arguments of the op, which `delta_gates` explains."""

    a: Tensor
    A_log: Tensor
    dt_bias: Tensor
    b: Tensor
    bias: Tensor | None
    largest: float


def compute(args: Arguments) -> tuple[Tensor, Tensor]:
    """log_decay and β, in the shape of a […,M]."""
    a, A_log, dt_bias, b, bias, largest = args
    (log_decay, beta), sizes = (new(a, dtype=torch.float32) for _ in range(2)), tile(a.shape[-1])
    (a, rows, a_row), (b, _, b_row) = rows_of(a), rows_of(b)
    tensors = (a, A_log, dt_bias, b, bias, log_decay, beta)
    enqueue(gates_forward, cdiv(rows, sizes["ROWS"]), *tensors, rows, a_row, b_row, largest, **sizes)
    return log_decay, beta


def fake(args: Arguments) -> tuple[Tensor, Tensor]:
    """Empty tensors of the shapes and dtypes that `compute` returns."""
    a = args.a
    return a.new_empty(a.shape, dtype=torch.float32), a.new_empty(a.shape, dtype=torch.float32)


def differentiate(
    gradients: Sequence[Tensor | None], residuals: Sequence[Tensor], needed: Any, args: Arguments
) -> Gradients:
    """The gradients of all tensors."""
    a, A_log, dt_bias, b, bias, largest = args
    arriving, sizes = [None if g is None else g.contiguous() for g in gradients], tile(a.shape[-1])
    da, db = new(a), new(b)
    (a, rows, a_row), (b, _, b_row) = rows_of(a), rows_of(b)
    programs = min(cdiv(rows, sizes["ROWS"]), multiprocessors(a.device) * PROGRAMS)
    parts = new(a, programs, sizes["M"], 3, dtype=torch.float32)
    strides = (rows, a_row, b_row)
    enqueue(gates_backward, programs, a, A_log, dt_bias, b, bias, *arriving, da, db, parts, *strides, largest, **sizes)
    dA_log, ddt_bias, dbias = add_parts(parts, torch.float32)  # the parameters' dtypes may differ
    return {
        "a": da,
        "A_log": dA_log.to(A_log.dtype),
        "dt_bias": ddt_bias.to(dt_bias.dtype),
        "b": db,
        "bias": None if bias is None else dbias.to(bias.dtype),
    }


delta_gates = register("delta_gates", compute, differentiate, fake, results=2)


def forward(gates: GateInputs) -> tuple[Tensor, Tensor]:
    """log_decay and β, in the shape of a."""
    bias = None if gates.bias is None else gates.bias.contiguous()
    A_log, dt_bias = gates.A_log.contiguous(), gates.dt_bias.contiguous()
    log_decay, beta = delta_gates(gates.a, A_log, dt_bias, gates.b, bias, gates.largest)
    return log_decay, beta
