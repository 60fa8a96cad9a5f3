"""Rotary positions: pairs of channels, a half of a head apart, turn by angles that grow with the position."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.allocation import new
from ..core.autograd import Gradients, plain, register
from ..core.backend import Op
from ..core.recurrence import at_least_fp32


class Arguments(NamedTuple):
    x: Tensor  # [B,T,H,D]
    positions: Tensor  # [B or 1,T]
    rates: Tensor  # [P]
    amplitude: float


def angles(args: Arguments) -> Tensor:
    """Angles [B or 1,T,1,P] in the dtype of `rates`: bf16 cannot represent position 10001."""
    return args.positions[..., None, None] * args.rates


def reference(x: Tensor, positions: Tensor, rates: Tensor, amplitude: float) -> Tensor:
    """The formula, with pairs as complex numbers."""
    angle = angles(Arguments(x, positions, rates, amplitude))
    first, second, rest = at_least_fp32(x).split([len(rates), len(rates), x.shape[3] - 2 * len(rates)], -1)
    turned = torch.complex(first, second) * torch.polar(torch.full_like(angle, amplitude), angle)
    return torch.cat([turned.real, turned.imag, rest], -1).to(x.dtype)


def empty(args: Arguments) -> tuple[Tensor]:
    """Uninitialised results."""
    return (new(args.x, *args.x.shape),)


def _turned(args: Arguments, sign: int) -> tuple[Tensor]:
    """Turn whole rows of heads: half a head is too short for a CPU's vector loops."""
    x, angle = args.x, angles(args)
    cos, sin = ((args.amplitude * part).to(x.dtype) for part in (angle.cos(), sign * angle.sin()))
    x, rest = x.split([2 * len(args.rates), x.shape[3] - 2 * len(args.rates)], -1)
    heads, rows = x.shape[2], (*x.shape[:2], x.shape[2] * x.shape[3])
    cos, sin = (torch.cat(both, -1).expand(-1, -1, heads, -1).flatten(2) for both in ((cos, cos), (-sin, sin)))
    other = torch.cat(x.chunk(2, -1)[::-1], -1)
    turned = (x.reshape(rows) * cos).addcmul_(other.view(rows), sin).view(x.shape)
    return (torch.cat([turned, rest], -1) if rest.shape[-1] else turned,)


def _compute(args: Arguments) -> tuple[Tensor]:
    return _turned(args, 1)


def _differentiate(args: Arguments, needed: Any, dy: Tensor) -> Gradients:
    return {"x": _turned(args._replace(x=dy), -1)[0]}


composed = register("rotary", _compute, _differentiate, empty, unread=lambda args: ("x",))
OP = Op("rotary", reference=reference, torch=composed, gpu="kernels.rotary.gpu.op:forward")


def rotary(x: Tensor, positions: Tensor, rates: Tensor, *, amplitude: float = 1.0) -> Tensor:
    """Turn each pair of channels (p, p + P) of a head by position · rate_p, and scale it (arXiv 2104.09864).

    The channels from 2P on do not change. Only `x` has a gradient.

    Args:
        x: Queries or keys [B,T,H,D].
        positions: Position of each token [B or 1,T], integers.
        rates: Angle by which each of P ≤ D/2 pairs turns per token [P], in radians, in at least fp32.
        amplitude: Factor of the channels that turn.

    Returns:
        y [B,T,H,D] in the dtype of x.

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """
    if x.dim() != 4 or not x.is_floating_point():
        raise ValueError(f"x: expected a floating [B,T,H,D], got {x.dtype} {tuple(x.shape)}")
    if positions.is_floating_point() or positions.shape not in [x.shape[:2], (1, x.shape[1])]:
        expected = f"integers [{x.shape[0]},{x.shape[1]}] or [1,{x.shape[1]}]"
        raise ValueError(f"positions: expected {expected}, got {positions.dtype} {tuple(positions.shape)}")
    if rates.dim() != 1 or not 0 < 2 * len(rates) <= x.shape[3] or at_least_fp32(rates) is not rates:
        raise ValueError(
            f"rates: expected [at most {x.shape[3] // 2}] in at least fp32, got {rates.dtype} {tuple(rates.shape)}"
        )
    args = Arguments(x, positions, rates, float(amplitude))
    y: Tensor = OP(x, *args) if plain(args[:3]) else _compute(args)[0]  # compilers fuse the formula
    return y
