"""RMS normalisation in Triton: one launch forward, one backward, which keeps nothing but the arguments."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import op
from ..columns import gradient_for
from ..enqueue import cdiv, enqueue, next_power_of_2
from ..launch import multiprocessors
from ..triton_parts import add_parts
from . import triton_kernels

ELEMENTS = 1024  # of a tile of short rows
PER_WARP, MOST_WARPS = 512, 16
# Backward, each program walks over many rows, as it leaves a part of the weight's gradient: so many on a multiprocessor
# are done at about the same time.
PROGRAMS, PROGRAMS_GATED = 12, 8


def new(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor that a kernel will fill."""
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)


def strided(x: Tensor) -> Tensor:
    """x […,D] as [outer, inner, D], where only the outer axis may have gaps: heads of a view of a projection."""
    if x.dim() < 2:
        return x.contiguous().view(1, 1, -1)
    x = x.flatten(0, -3) if x.dim() > 3 else x.flatten(0, -2).unsqueeze(1)
    dense = x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2])
    return x if dense else x.contiguous()


def tile(size: int) -> dict[str, int]:
    """Rows and columns of a tile, and its warps."""
    block = next_power_of_2(size)
    rows = max(1, ELEMENTS // block)
    return {"ROWS": rows, "BLOCK": block, "num_warps": max(1, min(rows * block // PER_WARP, MOST_WARPS))}


def constants(x: Tensor, gate: Tensor | None, weight: Tensor | None, gate_first: bool) -> dict[str, int | str | bool]:
    """What both kernels are compiled for, x being [outer, inner, D]."""
    order = "none" if gate is None else "first" if gate_first else "last"
    size = x.shape[2]
    return {"INNER": x.shape[1], "D": size, "GATE": order, "WEIGHT": weight is not None, **tile(size)}


def compute(
    x: Tensor, gate: Tensor | None, weight: Tensor | None, eps: float, gate_first: bool, dtype: torch.dtype
) -> tuple[Tensor]:
    """y of the shape of x."""
    y, rows = new(x, *x.shape, dtype=dtype), x.numel() // max(x.shape[-1], 1)
    weight = None if weight is None else weight.contiguous()
    x, gate = strided(x), None if gate is None else strided(gate)
    gate_outer = 0 if gate is None else gate.stride(0)
    fixed = constants(x, gate, weight, gate_first)
    grid, given = (cdiv(rows, int(fixed["ROWS"])),), (x, gate, weight, None, y, None)
    enqueue(triton_kernels.forward, grid, *given, rows, x.stride(0), gate_outer, eps, **fixed, ADD=False)
    return (y,)


def fake(
    x: Tensor, gate: Tensor | None, weight: Tensor | None, eps: float, gate_first: bool, dtype: torch.dtype
) -> tuple[Tensor]:
    """The shape of `compute`."""
    return (x.new_empty(x.shape, dtype=dtype),)


def differentiate_rows(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    dy: Tensor,
    dtotal: Tensor | None,
    eps: float,
    gate_first: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of x, to which `dtotal` is added, of the gate and of the weight."""
    dy, rows = dy.contiguous(), x.numel() // max(x.shape[-1], 1)
    dtotal = None if dtotal is None else dtotal.contiguous()
    dx, dgate = new(x, *x.shape), None if gate is None else strided(gradient_for(gate, new))
    weight = None if weight is None else weight.contiguous()
    x, gate = strided(x), None if gate is None else strided(gate)
    outer = [0 if given is None else given.stride(0) for given in (x, gate, dgate)]
    fixed = constants(x, gate, weight, gate_first)
    most = multiprocessors(x.device) * (PROGRAMS if gate is None else PROGRAMS_GATED)
    programs = min(cdiv(rows, int(fixed["ROWS"])), most)
    parts = None if weight is None else new(x, programs, 1, x.shape[2], dtype=torch.float32)
    given = (x, gate, weight, dy, dtotal, dx, dgate, parts)
    enqueue(triton_kernels.backward, (programs,), *given, rows, *outer, eps, **fixed, ADD=dtotal is not None)
    dweight = None if parts is None or weight is None else add_parts(parts, weight.dtype).view(weight.shape)
    return dx, None if dgate is None else dgate.view(dx.shape), dweight


def differentiate(
    gradients: Sequence[Tensor | None],
    kept: Sequence[Tensor],
    needed: Sequence[bool],
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    eps: float,
    gate_first: bool,
    dtype: torch.dtype,
) -> list[Tensor | None]:
    """The gradients of x, the gate and the weight."""
    assert gradients[0] is not None
    return [*differentiate_rows(x, gate, weight, gradients[0], None, eps, gate_first)]


rms_norm = op.register("rms_norm", compute, differentiate, fake, results=1)


class Added(torch.autograd.Function):
    """x + y and its norm, in one launch each way. The sum alone is kept; its gradient is that of both its terms.

    It is for calls that nobody traces: a compiler finds the sum and the norm by itself.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        flat, rows = strided(x.contiguous()), x.numel() // max(x.shape[-1], 1)
        total, h = new(x, *x.shape), new(x, *x.shape, dtype=dtype)
        fixed = constants(flat, None, weight, False)
        grid, given = (cdiv(rows, int(fixed["ROWS"])),), (flat, None, weight, y.contiguous(), h, total)
        enqueue(triton_kernels.forward, grid, *given, rows, flat.stride(0), 0, eps, **fixed, ADD=True)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(total, weight)
        ctx.eps, ctx.other = eps, y.dtype
        return total, h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor | None, dh: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight = ctx.saved_tensors
        if dh is None:
            return dtotal, None if dtotal is None else dtotal.to(ctx.other), None, None, None
        dx, dweight = differentiate_rows(total, None, weight, dh, dtotal, ctx.eps, False)[::2]
        return dx, dx.to(ctx.other), dweight, None, None
