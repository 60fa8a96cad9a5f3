"""Angles that add up along time, modulo a full turn: those of the rotary embedding of Mamba-3."""

from typing import Any

import torch
from torch import Tensor

from ..core.backend import Op
from ..core.deterministic import is_deterministic
from ..core.documents import documents, places

# Sums of multiples of 1 / GRID are exact in fp64 while those along a row stay below 16,384 turns (half of 2¹⁵), so
# their order does not matter.
GRID = 2.0**38
MOST = 8192  # angles of a token that the kernels hold in registers
TORCH_BLOCK = 64  # tokens that PyTorch adds up one after the other; blocks are added up at the same time


def angles_of(rates: Tensor, steps: Tensor) -> Tensor:
    """The angle that each token adds [B,T,H,P], of rates [B,T,P] and steps [B,T,H]."""
    return rates[:, :, None] * steps[..., None] / 2


def running_sums(angles: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sums of angles [B,T,…] along time in each document, in fp64: with and without the token's own angle."""
    total, earlier = _RunningSums.apply(angles, cu_seqlens)
    return total, earlier


class _RunningSums(torch.autograd.Function):
    """Sums on the grid. Their gradients repeat to the bit; those of an index would be summed in any order on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.cu_seqlens, ctx.dtype = cu_seqlens, x.dtype
        wide = (x.double() * GRID).round_().div_(GRID)
        total = _sums(wide)
        if cu_seqlens is not None:
            _, place = places(cu_seqlens, x.shape[1])
            first = torch.arange(x.shape[1], device=x.device) - place
            total = total - (total - wide)[:, first]
        return total, total - wide

    @staticmethod
    def backward(ctx: Any, of_total: Tensor, of_earlier: Tensor) -> tuple[Tensor, None]:
        gradient = of_total + of_earlier
        total, last = _sums(gradient), slice(-1, None)
        if ctx.cu_seqlens is not None:
            owner, _ = places(ctx.cu_seqlens, gradient.shape[1])
            last = (ctx.cu_seqlens[1:].long() - 1)[owner]
        return (total[:, last] - total + of_total).to(ctx.dtype), None


def _sums(x: Tensor) -> Tensor:
    """Sums of x [B,T,…] along time: within blocks, and of the blocks before."""
    T = x.shape[1]
    if T <= TORCH_BLOCK:
        return x.cumsum(1)
    padded = torch.cat([x, x.new_zeros(x.shape[0], -T % TORCH_BLOCK, *x.shape[2:])], 1) if T % TORCH_BLOCK else x
    within = padded.unflatten(1, (-1, TORCH_BLOCK)).cumsum(2)
    ends = within[:, :-1, -1].cumsum(1)
    within[:, 1:] += ends[:, :, None]
    return within.flatten(1, 2)[:, :T]


def composed(rates: Tensor, steps: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """The sums in PyTorch."""
    total, earlier = running_sums(angles_of(rates, steps), cu_seqlens)
    return total.remainder(1).to(rates.dtype), earlier.remainder(1).to(rates.dtype)


def reference(rates: Tensor, steps: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """The sums as a loop over tokens, in fp64."""
    angles = angles_of(rates, steps).double()
    angles = angles + ((angles.detach() * GRID).round() / GRID - angles.detach())
    starts = [0] if cu_seqlens is None else documents(cu_seqlens, rates.shape[1]).bounds
    sums, earlier, total = [], [], torch.zeros_like(angles[:, 0])
    for t in range(rates.shape[1]):
        total = torch.zeros_like(total) if t in starts else total
        earlier.append(total)
        total = total + angles[:, t]
        sums.append(total)
    total, before = (torch.stack(x, 1).remainder(1).to(rates.dtype) for x in (sums, earlier))
    return total, before


def _limits(rates: Tensor, steps: Tensor, *rest: object) -> str | None:
    padded = (rates.shape[2] - 1).bit_length() + (steps.shape[2] - 1).bit_length()  # as exponents of 2
    return None if 2**padded <= MOST else f"which adds up at most {MOST} angles of a token, padded to powers of 2"


OP = Op("turns", reference=reference, torch=composed, gpu="kernels.turns.gpu.op:forward", limits=_limits)


def turns(rates: Tensor, steps: Tensor, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Add up the angles rates_t · steps_t / 2 along time, modulo 1.

    The sums are exact, so their order does not matter: in PyTorch while those of a row stay below 16,384 turns, in
    Triton while an angle stays below 8,192. In deterministic mode PyTorch computes them, since Triton adds gradients in
    blocks.

    Args:
        rates: Rate of each pair [B,T,P], in half turns, in fp32 or fp64.
        steps: Step of each head [B,T,H], in the dtype of the rates.
        cu_seqlens: Boundaries [N+1] of documents packed into one row (B = 1), from 0 to T; documents may be empty.

    Returns:
        Sums [B,T,H,P] in full turns, from 0 to 1: with, and without, the token's own angle.

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """
    if rates.dim() != 3 or not rates.shape[1]:
        raise ValueError(f"rates: expected [B,T,P] with at least one token, got shape {tuple(rates.shape)}")
    if steps.shape[:-1] != rates.shape[:-1] or steps.dtype != rates.dtype:
        wanted = f"[{len(rates)}, {rates.shape[1]}, H] in {rates.dtype}"
        raise ValueError(f"steps: expected {wanted}, got {tuple(steps.shape)} in {steps.dtype}")
    if cu_seqlens is not None and not torch.compiler.is_compiling():
        documents(cu_seqlens, rates.shape[1], len(rates), rates.device)
    if rates.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"rates: expected fp32 or fp64, got {rates.dtype}")
    args = (rates, steps, cu_seqlens)
    total, earlier = composed(*args) if is_deterministic() else OP(rates, *args)
    return total, earlier
