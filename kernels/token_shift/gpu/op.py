"""All mixtures of tokens with the previous ones in one launch, and their gradients in another.

A tile has neighbouring tokens, so that the previous ones, and the gradients of the next ones, come from the cache.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment"
# ruff: noqa: RUF005

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.allocation import new
from ...core.autograd import once
from ...core.documents import places
from ...gpu.launch import cdiv, enqueue, next_power_of_2
from ...gpu.overlap import MOST_EARLY, wait
from ...gpu.reductions import add_parts
from ...gpu.rows import load, per_channel, walkers
from .. import MOST

ROWS, COLUMNS, WARPS = 4, 256, 4
PROGRAMS = 3  # per multiprocessor in the backward pass; each stores its part of the gradient of the shares


@triton.jit
def tokens_of(owner, positions, r, rows, T):
    """The sequence of each token, and whether it is its first one; both for tokens beyond the last, too."""
    if positions is None:
        sequence, position = r // T, r % T
    else:
        sequence, position = tl.load(owner + r, mask=r < rows, other=0), tl.load(positions + r, mask=r < rows, other=0)
    return sequence, position == 0


@triton.jit
def difference_at(x, before, sequence, first, here, inside, c, D: tl.constexpr):
    """x, and the previous token minus x."""
    u, previous = load(x, here, inside), load(x, here - D, inside & ~first[:, None])
    if before is not None:
        previous += load(before, sequence[:, None] * D + c[None, :], inside & first[:, None])
    return u, previous - u


@triton.jit(do_not_specialize=["rows", "T"])
def mix(
    x,  # [rows,D]
    shares,  # [N,D]
    before,  # [sequences,D]
    owner,  # [rows], like positions: of packed documents
    positions,
    y0,  # [rows,D], like the other mixtures
    y1,
    y2,
    y3,
    y4,
    y5,
    rows,
    T,
    N: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait(OVERLAP)
    BLOCKS: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    r = (tl.program_id(0) // BLOCKS).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(0) % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    here, inside = r[:, None] * D + c[None, :], (r < rows)[:, None] & (c < D)[None, :]
    sequence, first = tokens_of(owner, positions, r, rows, T)
    u, difference = difference_at(x, before, sequence, first, here, inside, c, D)
    mixtures = (y0, y1, y2, y3, y4, y5)
    for i in tl.static_range(N):
        mixture = u + difference * per_channel(shares + i * D, c, D)
        tl.store(mixtures[i] + here, mixture.to(mixtures[i].dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "T"])
def differentiate(
    x,
    shares,
    before,
    owner,
    positions,
    dy0,
    dy1,
    dy2,
    dy3,
    dy4,
    dy5,
    dx,
    dbefore,  # [sequences,D]
    parts,  # [programs / BLOCKS,N,D]: gradients of the shares, to be summed
    rows,
    T,
    N: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    BLOCKS: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    walker, count = tl.program_id(0) // BLOCKS, tl.num_programs(0) // BLOCKS
    c = tl.program_id(0) % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    gradients, sums = (dy0, dy1, dy2, dy3, dy4, dy5), ()  # of the mixtures and of their shares
    for _i in tl.static_range(N):
        sums = sums + (tl.zeros([ROWS, COLUMNS], tl.float32),)
    for start in tl.range(walker * ROWS, rows, count * ROWS):
        r = (start + tl.arange(0, ROWS)).to(tl.int64)
        here, inside = r[:, None] * D + c[None, :], (r < rows)[:, None] & (c < D)[None, :]
        sequence, first = tokens_of(owner, positions, r, rows, T)
        _, resets = tokens_of(owner, positions, r + 1, rows, T)
        follows = inside & ((r + 1 < rows) & ~resets)[:, None]
        _, difference = difference_at(x, before, sequence, first, here, inside, c, D)
        totals = ()
        for i in tl.static_range(N):
            share, d = per_channel(shares + i * D, c, D), load(gradients[i], here, inside)
            of_token, of_previous = d * (1 - share) + load(gradients[i], here + D, follows) * share, d * share
            if i == 0:
                du, dprevious = of_token, of_previous
            else:
                du, dprevious = du + of_token, dprevious + of_previous
            totals = totals + (sums[i] + d * difference,)
        sums = totals
        tl.store(dx + here, du.to(dx.dtype.element_ty), mask=inside)
        if dbefore is not None:
            at = sequence[:, None] * D + c[None, :]
            tl.store(dbefore + at, dprevious.to(dbefore.dtype.element_ty), mask=inside & first[:, None])
    at = parts + walker * (N * D) + c
    for i in tl.static_range(N):
        tl.store(at + i * D, tl.sum(sums[i], 0), mask=c < D)


def tables(x: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Document and position of each token [T]; None without documents."""
    return (None, None) if cu_seqlens is None else places(cu_seqlens, x.shape[1])


def constants(x: Tensor, shares: Tensor) -> dict[str, int]:
    """The constants of both kernels."""
    N, D = shares.shape
    return {"N": N, "D": D, "ROWS": ROWS, "COLUMNS": min(COLUMNS, next_power_of_2(D)), "warps": WARPS}


def six(tensors: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """The tensors, and None for each mixture that a kernel could make besides."""
    return (*tensors, *[None] * (MOST - len(tensors)))


class TokenShift(torch.autograd.Function):
    """The mixtures of x. Only the arguments are saved.

    For eager calls only: a compiler fuses the composition automatically.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shares: Tensor, before: Tensor | None, cu_seqlens: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        x, shares, before = x.contiguous(), shares.contiguous(), None if before is None else before.contiguous()
        sizes, rows = constants(x, shares), x.shape[0] * x.shape[1]
        mixtures = tuple(new(x, dtype=dtype) for _ in range(sizes["N"]))
        programs = cdiv(rows, ROWS) * cdiv(sizes["D"], sizes["COLUMNS"])
        tensors = (x, shares, before, *tables(x, cu_seqlens), *six(mixtures))
        enqueue(mix, programs, *tensors, rows, x.shape[1], **sizes, overlap=programs <= MOST_EARLY)
        ctx.save_for_backward(x, shares, before, cu_seqlens)
        return mixtures

    @staticmethod
    @once
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, shares, before, cu_seqlens = ctx.saved_tensors
        sizes, rows = constants(x, shares), x.shape[0] * x.shape[1]
        dx, dbefore = new(x), None
        if ctx.needs_input_grad[2]:
            dbefore = torch.zeros_like(before)  # documents may be empty
        blocks = cdiv(sizes["D"], sizes["COLUMNS"])
        count = walkers(rows, ROWS, x.device, PROGRAMS, blocks)
        parts = new(x, count, 1, shares.numel(), dtype=torch.float32)
        tensors = (x, shares, before, *tables(x, cu_seqlens), *six(tuple(dy.contiguous() for dy in gradients)))
        enqueue(differentiate, count * blocks, *tensors, dx, dbefore, parts, rows, x.shape[1], **sizes)
        return dx, add_parts(parts, shares.dtype).view(shares.shape), dbefore, None, None


def forward(*args: Any) -> tuple[Tensor, ...]:
    """The mixtures [B,T,D]; the arguments are those of `composed`."""
    mixtures: tuple[Tensor, ...] = TokenShift.apply(*args)
    return mixtures
