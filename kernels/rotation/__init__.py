"""Add a bias of each head to queries or keys of groups, and rotate them by the angles of each token (Mamba-3)."""

import math
from typing import Any

import torch
from torch import Tensor

from ..core.backend import Op
from ..core.recompute import remake
from ..core.recurrence import at_least_fp32


def biased(x: Tensor, bias: Tensor, subheads: int) -> Tensor:
    """Repeat x [B,T,G·E,K] for all heads and add their biases: [B,T,H·E,K]."""
    repeats = bias.shape[0] // x.shape[2]
    grouped = x.unflatten(2, (-1, 1, subheads)).expand(-1, -1, -1, repeats, -1, -1)
    return grouped.flatten(2, 4) + bias.to(x.dtype)


def reference(x: Tensor, bias: Tensor, angles: Tensor, subheads: int) -> Tensor:
    """The formula, with pairs as complex numbers."""
    wide = biased(at_least_fp32(x), bias, subheads)
    pairs, angles = angles.shape[-1], at_least_fp32(angles)
    numbers = torch.view_as_complex(wide[..., : 2 * pairs].unflatten(-1, (pairs, 2)).contiguous())
    turned = numbers * torch.polar(torch.ones_like(angles), 2 * math.pi * angles)
    return torch.cat([torch.view_as_real(turned).flatten(-2), wide[..., 2 * pairs :]], -1).to(x.dtype)


def composed(x: Tensor, bias: Tensor, angles: Tensor, subheads: int) -> Tensor:
    """The formula in PyTorch, which saves its arguments alone inside `recomputing()`."""
    y: Tensor = _Rotation.apply(remake(biased(x, bias, subheads), biased, x, bias, subheads), angles)
    return y


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate the first pairs (0, 1), (2, 3), … of x [B,T,H,K] by `angles` [B,T,H,P], in full turns."""
    pairs = angles.shape[-1]
    return torch.cat([torch.stack(_turned(x, angles), -1).flatten(-2), x[..., 2 * pairs :]], -1)


def _turned(x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    """The first and second numbers of the rotated pairs."""
    radians = 2 * math.pi * at_least_fp32(angles)  # a product in half precision would be off by whole degrees
    cos, sin = radians.cos().to(x.dtype), radians.sin().to(x.dtype)
    a, b = _pairs(x, angles)
    return a * cos - b * sin, a * sin + b * cos


def _pairs(x: Tensor, angles: Tensor) -> tuple[Tensor, ...]:
    pairs = angles.shape[-1]
    return x[..., : 2 * pairs].unflatten(-1, (pairs, 2)).unbind(-1)


class _Rotation(torch.autograd.Function):
    """`rotated`, which saves its arguments alone; autograd would save cosines, sines and halves of x as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, angles: Tensor) -> Tensor:
        ctx.save_for_backward(x, angles)
        return rotated(x, angles)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None]:
        x, angles = ctx.saved_tensors
        dx, dangles = rotated(dy, -angles), None
        if ctx.needs_input_grad[1]:
            (a, b), (da, db) = _turned(x, angles), _pairs(dy, angles)
            dangles = 2 * math.pi * (db * a - da * b).to(angles.dtype)
        return dx, dangles


OP = Op("rotation", reference=reference, torch=composed, gpu="kernels.rotation.gpu.op:forward")


def rotation(x: Tensor, bias: Tensor, angles: Tensor, *, subheads: int = 1) -> Tensor:
    """Rotate the first pairs of channels (0, 1), (2, 3), … of x + bias; the other channels are not rotated.

    Inside `recomputing()`, the backward pass recomputes the result. Heads are numbered by head and subhead: the H heads
    have E subheads each, and H/G heads in a row share the x of a group.

    Args:
        x: Queries or keys [B,T,G·E,K].
        bias: Bias of each subhead of each head [H·E,K].
        angles: Angles [B,T,H·E,P] in full turns, for P ≤ K/2 pairs; sines and cosines are computed in at least fp32.
        subheads: E.

    Returns:
        y [B,T,H·E,K] in the dtype of x.

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """
    if x.dim() != 4 or not x.shape[1]:
        raise ValueError(f"x: expected [B,T,G·E,K] with at least one token, got shape {tuple(x.shape)}")
    if not x.is_floating_point():
        raise ValueError(f"x: expected a floating dtype, got {x.dtype}")
    B, T, groups, K = x.shape
    if subheads < 1:
        raise ValueError(f"subheads: must be at least 1, got {subheads}")
    heads, pairs = bias.shape[0] if bias.dim() else 0, angles.shape[-1]
    if not groups or groups % subheads or bias.shape != (heads, K) or heads % groups:
        raise ValueError(
            f"bias: shape {tuple(bias.shape)} does not fit {groups} x {K} channels of x with {subheads} subheads; "
            "expected a row of channels for a multiple of the heads of x, which are a multiple of the subheads"
        )
    if angles.shape != (B, T, heads, pairs) or 2 * pairs > K:
        raise ValueError(f"angles: expected [{B}, {T}, {heads}, at most {K // 2}], got {tuple(angles.shape)}")
    args = (x, bias, angles, subheads)
    run = OP.choose(x, *args)
    return remake(run(*args), run, *args)
