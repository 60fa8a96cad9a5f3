"""Rotary positions: pairs of channels, a half of a head apart, turn by angles that grow with the position."""

from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from ..core.allocation import new
from ..core.autograd import Gradients, plain, register
from ..core.backend import Op
from ..core.recurrence import at_least_fp32


class Arguments(NamedTuple):
    x: Tensor  # [B,T,H,D]
    other: Tensor | None  # [B,T,H',D']
    positions: Tensor  # [B or 1,T]
    rates: Tensor  # [P]
    amplitude: float
    last: bool  # whether the last 2P channels of a head turn; otherwise the first

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that turn."""
        return (self.x,) if self.other is None else (self.x, self.other)


class Turned(NamedTuple):
    x: Tensor
    other: Tensor | None  # None without another tensor


def angles(args: Arguments) -> Tensor:
    """Angles [B or 1,T,1,P] in the dtype of `rates`: bf16 cannot represent position 10001."""
    return args.positions[..., None, None] * args.rates


def _parts(x: Tensor, pairs: int, last: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The channels [..., before], [..., 2·pairs] and [..., behind] of x, of which those in the middle turn."""
    rest = x.shape[3] - 2 * pairs
    before, middle, behind = x.split([rest * last, 2 * pairs, rest * (not last)], -1)
    return before, middle, behind


def reference(
    x: Tensor, other: Tensor | None, positions: Tensor, rates: Tensor, amplitude: float, last: bool
) -> Turned:
    """The formula, with pairs as complex numbers."""
    args = Arguments(x, other, positions, rates, amplitude, last)
    angle = angles(args)

    def turned(x: Tensor) -> Tensor:
        before, middle, behind = _parts(at_least_fp32(x), len(rates), last)
        y = torch.complex(*middle.chunk(2, -1)) * torch.polar(torch.full_like(angle, amplitude), angle)
        return torch.cat([before, y.real, y.imag, behind], -1).to(x.dtype)

    return Turned(turned(x), None if other is None else turned(other))


def empty(args: Arguments) -> Turned:
    """Uninitialised results."""
    x, other = args[:2]
    return Turned(new(x, *x.shape), None if other is None else new(other, *other.shape))


def gradients(turn: Any, args: Arguments, dx: Tensor | None, dother: Tensor | None) -> Gradients:
    """The gradients of the tensors: those of the results, turned the other way by `turn(args, -1)`."""
    if args.other is None or dother is None:
        return {} if dx is None else {"x": turn(args._replace(x=dx, other=None), -1).x}
    if dx is None:
        return {"other": turn(args._replace(x=dother, other=None), -1).x}
    dx, dother = turn(args._replace(x=dx, other=dother), -1)
    return {"x": dx, "other": dother}


def read_by_no_gradient(args: Arguments) -> list[str]:
    """The names of the tensors whose values the backward pass does not read."""
    return ["x", "other"][: len(args.tensors)]


def _turned(args: Arguments, sign: int) -> Turned:
    """Turn whole rows of heads: half a head is too short for a CPU's vector loops."""
    angle, pairs = angles(args), len(args.rates)

    def turned(x: Tensor) -> Tensor:
        cos, sin = ((args.amplitude * part).to(x.dtype) for part in (angle.cos(), sign * angle.sin()))
        before, middle, behind = _parts(x, pairs, args.last)
        heads, rows = x.shape[2], (*x.shape[:2], x.shape[2] * 2 * pairs)
        cos, sin = (torch.cat(both, -1).expand(-1, -1, heads, -1).flatten(2) for both in ((cos, cos), (-sin, sin)))
        swapped = torch.cat(middle.chunk(2, -1)[::-1], -1)
        y = (middle.reshape(rows) * cos).addcmul_(swapped.view(rows), sin).view(middle.shape)
        return torch.cat([before, y, behind], -1) if x.shape[3] > 2 * pairs else y

    return Turned(turned(args.x), None if args.other is None else turned(args.other))


def _compute(args: Arguments) -> Turned:
    return _turned(args, 1)


def _differentiate(args: Arguments, needed: Any, dx: Tensor | None, dother: Tensor | None) -> Gradients:
    return gradients(_turned, args, dx, dother)


composed = register("rotary", _compute, _differentiate, empty, results=2, unread=read_by_no_gradient)
OP = Op("rotary", reference=reference, torch=composed, gpu="kernels.rotary.gpu.op:forward")


class Turn(NamedTuple):
    """Positions of the queries and keys of one token, as other ops take them."""

    positions: Tensor  # tokens seen before [B], integers
    # angles per token, in at least fp32: [P] turns pairs as `rotary` does; [G,K] makes [cos·x, sin·x] of each channel
    rates: Tensor
    amplitude: float = 1.0  # of pairs
    last: bool = False  # whether the last 2P channels of a head turn; otherwise the first

    @property
    def doubles(self) -> bool:
        """Return whether a head becomes twice as large."""
        return self.rates.dim() == 2

    def __call__(self, x: Tensor) -> Tensor:
        """Turn the heads of x [B,1,G,K]."""
        if not self.doubles:
            return rotary(x, self.positions[:, None], self.rates, amplitude=self.amplitude, last=self.last)
        return doubled(x, self.positions[:, None], self.rates)


def doubled(x: Tensor, positions: Tensor, rates: Tensor) -> Tensor:
    """[cos(rate · position) · x, sin(rate · position) · x] of each channel (LRPE, arXiv 2307.09270), in PyTorch.

    Args:
        x: Queries or keys [B,T,H,D].
        positions: Position of each token [B or 1,T].
        rates: Angle per token of each channel of each head [H,D], in at least fp32.

    Returns:
        y [B,T,H,2·D] in the dtype of x.
    """
    angle = positions[..., None, None] * rates
    return torch.cat([x * angle.cos().to(x.dtype), x * angle.sin().to(x.dtype)], -1)


@overload
def rotary(
    x: Tensor, positions: Tensor, rates: Tensor, *, amplitude: float = 1.0, last: bool = False, other: None = None
) -> Tensor: ...


@overload
def rotary(
    x: Tensor, positions: Tensor, rates: Tensor, *, amplitude: float = 1.0, last: bool = False, other: Tensor
) -> tuple[Tensor, Tensor]: ...


def rotary(
    x: Tensor,
    positions: Tensor,
    rates: Tensor,
    *,
    amplitude: float = 1.0,
    last: bool = False,
    other: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Turn each pair of channels (p, p + P) of a head by position · rate_p, and scale it (arXiv 2104.09864).

    The channels from 2P on do not change. `rates` have a gradient, too, if they require one.

    Args:
        x: Queries or keys [B,T,H,D].
        positions: Position of each token [B or 1,T], integers.
        rates: Angle by which each of P ≤ D/2 pairs turns per token [P], in radians, in at least fp32.
        amplitude: Factor of the channels that turn.
        last: Whether the last 2P channels turn, and the ones before them do not change.
        other: Another tensor [B,T,H',D'], which turns in the same launch; None for none.

    Returns:
        y [B,T,H,D] in the dtype of x; with `other`, its result as well.

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """
    for name, z in (("x", x), *([] if other is None else [("other", other)])):
        if z.dim() != 4 or z.shape[:2] != x.shape[:2] or not z.is_floating_point():
            rows = "[B,T,H,D]" if z is x else f"[{x.shape[0]},{x.shape[1]},H,D]"
            raise ValueError(f"{name}: expected a floating {rows}, got {z.dtype} {tuple(z.shape)}")
    if positions.is_floating_point() or positions.shape not in [x.shape[:2], (1, x.shape[1])]:
        expected = f"integers [{x.shape[0]},{x.shape[1]}] or [1,{x.shape[1]}]"
        raise ValueError(f"positions: expected {expected}, got {positions.dtype} {tuple(positions.shape)}")
    size = min(x.shape[3], x.shape[3] if other is None else other.shape[3])
    if rates.dim() != 1 or not 0 < 2 * len(rates) <= size or at_least_fp32(rates) is not rates:
        raise ValueError(
            f"rates: expected [at most {size // 2}] in at least fp32, got {rates.dtype} {tuple(rates.shape)}"
        )
    args = Arguments(x, other, positions, rates, float(amplitude), last)
    # compilers fuse the formula, and rates that are learned get their gradient from it
    learned = torch.is_grad_enabled() and rates.requires_grad
    turned: Turned = OP(x, *args) if plain(args[:4]) and not learned else _compute(args)
    return turned[0] if turned[1] is None else (turned[0], turned[1])
