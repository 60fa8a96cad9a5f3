"""All mixtures of tokens with the previous ones in one launch, and their gradients in another.

A tile has neighbouring tokens, so that the previous ones, and the gradients of the next ones, come from the cache.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.allocation import new
from ...core.autograd import once
from ...core.documents import places
from ...gpu.launch import cdiv, enqueue, next_power_of_2
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


@triton.jit
def store_mixture(y, shares, u, difference, here, inside, c, D: tl.constexpr):
    mixture = u + difference * per_channel(shares, c, D)
    tl.store(y + here, mixture.to(y.dtype.element_ty), mask=inside)


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
):
    BLOCKS: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    r = (tl.program_id(0) // BLOCKS).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(0) % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    here, inside = r[:, None] * D + c[None, :], (r < rows)[:, None] & (c < D)[None, :]
    sequence, first = tokens_of(owner, positions, r, rows, T)
    u, difference = difference_at(x, before, sequence, first, here, inside, c, D)
    store_mixture(y0, shares, u, difference, here, inside, c, D)
    if N > 1:
        store_mixture(y1, shares + D, u, difference, here, inside, c, D)
    if N > 2:
        store_mixture(y2, shares + 2 * D, u, difference, here, inside, c, D)
    if N > 3:
        store_mixture(y3, shares + 3 * D, u, difference, here, inside, c, D)
    if N > 4:
        store_mixture(y4, shares + 4 * D, u, difference, here, inside, c, D)
    if N > 5:
        store_mixture(y5, shares + 5 * D, u, difference, here, inside, c, D)


@triton.jit
def gradients_of(dy, shares, difference, here, inside, follows, c, D: tl.constexpr):
    """Contributions of a mixture to the gradients of its tokens, of the tokens before sequences, and of its share."""
    share, d = per_channel(shares, c, D), load(dy, here, inside)
    return d * (1 - share) + load(dy, here + D, follows) * share, d * share, d * difference


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
    parts0 = tl.zeros([ROWS, COLUMNS], tl.float32)
    parts1, parts2, parts3, parts4, parts5 = parts0, parts0, parts0, parts0, parts0
    for start in tl.range(walker * ROWS, rows, count * ROWS):
        r = (start + tl.arange(0, ROWS)).to(tl.int64)
        here, inside = r[:, None] * D + c[None, :], (r < rows)[:, None] & (c < D)[None, :]
        sequence, first = tokens_of(owner, positions, r, rows, T)
        _, resets = tokens_of(owner, positions, r + 1, rows, T)
        follows = inside & ((r + 1 < rows) & ~resets)[:, None]
        _, difference = difference_at(x, before, sequence, first, here, inside, c, D)
        du, dprevious, part = gradients_of(dy0, shares, difference, here, inside, follows, c, D)
        parts0 += part
        if N > 1:
            more, of_previous, part = gradients_of(dy1, shares + D, difference, here, inside, follows, c, D)
            du, dprevious, parts1 = du + more, dprevious + of_previous, parts1 + part
        if N > 2:
            more, of_previous, part = gradients_of(dy2, shares + 2 * D, difference, here, inside, follows, c, D)
            du, dprevious, parts2 = du + more, dprevious + of_previous, parts2 + part
        if N > 3:
            more, of_previous, part = gradients_of(dy3, shares + 3 * D, difference, here, inside, follows, c, D)
            du, dprevious, parts3 = du + more, dprevious + of_previous, parts3 + part
        if N > 4:
            more, of_previous, part = gradients_of(dy4, shares + 4 * D, difference, here, inside, follows, c, D)
            du, dprevious, parts4 = du + more, dprevious + of_previous, parts4 + part
        if N > 5:
            more, of_previous, part = gradients_of(dy5, shares + 5 * D, difference, here, inside, follows, c, D)
            du, dprevious, parts5 = du + more, dprevious + of_previous, parts5 + part
        tl.store(dx + here, du.to(dx.dtype.element_ty), mask=inside)
        if dbefore is not None:
            at = sequence[:, None] * D + c[None, :]
            tl.store(dbefore + at, dprevious.to(dbefore.dtype.element_ty), mask=inside & first[:, None])
    at = parts + walker * (N * D) + c
    tl.store(at, tl.sum(parts0, 0), mask=c < D)
    if N > 1:
        tl.store(at + D, tl.sum(parts1, 0), mask=c < D)
    if N > 2:
        tl.store(at + 2 * D, tl.sum(parts2, 0), mask=c < D)
    if N > 3:
        tl.store(at + 3 * D, tl.sum(parts3, 0), mask=c < D)
    if N > 4:
        tl.store(at + 4 * D, tl.sum(parts4, 0), mask=c < D)
    if N > 5:
        tl.store(at + 5 * D, tl.sum(parts5, 0), mask=c < D)


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
        enqueue(mix, programs, *tensors, rows, x.shape[1], **sizes)
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
