"""Root-mean-square normalisation, alone and with an output gate, and LayerNorm."""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..core.autocast import autocast_dtype
from ..core.autograd import plain
from ..core.backend import Op
from ..core.recompute import remake
from .composition import ACTIVATIONS, forward, reference

LARGEST = 8192  # the kernels hold whole rows in registers


def _limits(x: Tensor, *rest: Any) -> str | None:
    return None if x.shape[-1] <= LARGEST else f"which takes rows of at most {LARGEST}"


def _separately(x: Tensor, y: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    total = x + y
    return total, _run(OP, total, None, weight, bias, eps)


GPU = "kernels.norm.gpu.op:forward"
OP = Op("rms_norm", reference=reference, torch=forward, gpu=GPU, limits=_limits)
LAYER = Op("layer_norm", reference=reference, torch=forward, gpu=GPU, limits=_limits)
GATED = Op("gated_rms_norm", reference=reference, torch=forward, gpu=GPU, limits=_limits)
ADDED = Op("add_rms_norm", reference=_separately, torch=_separately, gpu="kernels.norm.gpu.op:added")


class GatedNorm(NamedTuple):
    """The arguments of `gated_rms_norm` besides x, where they are explained.

    `recurrence_token` also takes them without a gate, as those of `rms_norm`.
    """

    gate: Tensor | None
    weight: Tensor | None
    eps: float
    gate_first: bool = False
    activation: Literal["silu", "sigmoid"] = "silu"


class QKNorm(NamedTuple):
    """The arguments of `rms_norm` for the first channels of a query or key, as other ops take them."""

    size: int  # of these channels
    weight: Tensor | None  # [size]
    eps: float
    offset: float = 0.0  # added to the weight: 1 if it is centred at zero

    def __call__(self, x: Tensor) -> Tensor:
        """x […,D] with its first channels normalised."""
        weight = self.weight if self.weight is None or not self.offset else self.offset + self.weight
        if self.size == x.shape[-1]:
            return rms_norm(x, weight, self.eps)
        first, rest = x.split([self.size, x.shape[-1] - self.size], -1)
        return torch.cat([rms_norm(first, weight, self.eps), rest], -1)


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """x / √(mean x² + eps) · weight over the last axis, computed in at least fp32.

    Args:
        x: Input of any shape […,D].
        weight: Scale [D], or None.
        eps: Added inside the root.

    Returns:
        The norm in the shape and dtype of x; under autocast in the dtype that the next layer would cast it to anyway.

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """
    return _run(OP, x, None, weight, None, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """(x − mean x) / √(var x + eps) · weight + bias over the last axis (arXiv 1607.06450).

    `bias` is [D]; the rest is as for `rms_norm`.
    """
    return _run(LAYER, x, None, weight, bias, eps)


def add_layer_norm(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    """x + y and layer_norm(x + y, weight, bias, eps); arguments and results are as for `add_rms_norm`."""
    return _add(x, y, weight, bias, eps)


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """x + y and rms_norm(x + y, weight, eps): the residual stream, and the input of the next layer.

    Args:
        x: Input of any shape […,D].
        y: Input in the shape of x; its dtype may be lower.
        weight: Scale [D], or None.
        eps: Added inside the root.

    Returns:
        The sum in the dtype of x, and its norm as from `rms_norm`.

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """
    return _add(x, y, weight, None, eps)


def _add(x: Tensor, y: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    if y.shape != x.shape:
        raise ValueError(f"y: expected the shape of x, {tuple(x.shape)}, got {tuple(y.shape)}")
    _check(x, weight, bias)
    fits = x.shape[-1] <= LARGEST and torch.promote_types(x.dtype, y.dtype) == x.dtype
    total, h = (ADDED.choose(x) if fits and plain((x, y, weight, bias)) else _separately)(x, y, weight, bias, eps)
    return total, h


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    gate_first: bool = False,
    activation: Literal["silu", "sigmoid"] = "silu",
) -> Tensor:
    """rms_norm(x) · SiLU(gate), or rms_norm(x · SiLU(gate)) with `gate_first` (Mamba2); σ(gate) with "sigmoid" (KDA).

    Args:
        x: Input of any shape […,D].
        gate: Gate before its activation, in the shape of x.
        weight: Scale [D], or None.
        eps: Added inside the root.
        gate_first: Whether the gate is applied before the norm.
        activation: Activation of the gate, silu or sigmoid.

    Returns:
        The norm in the shape and dtype of x; under autocast in the dtype that the next layer would cast it to anyway.

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """
    if gate.shape != x.shape:
        raise ValueError(f"gate: expected the shape of x, {tuple(x.shape)}, got {tuple(gate.shape)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: {activation!r} is not one of {', '.join(ACTIVATIONS)}")
    return _run(GATED, x, gate, weight, None, eps, gate_first, activation)


def _run(
    op: Op,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    gate_first: bool = False,
    activation: str = "silu",
) -> Tensor:
    _check(x, weight, bias)
    args = (x, gate, weight, bias, eps, gate_first, activation, dtype_of(x))
    run = op.choose(x, *args)
    return remake(run(*args), run, *args)


def _check(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    if not x.dim() or not x.is_floating_point():
        raise ValueError(f"x: expected a floating […,D], got {x.dtype} {tuple(x.shape)}")
    for name, z in (("weight", weight), ("bias", bias)):
        if z is not None and z.shape != x.shape[-1:]:
            raise ValueError(f"{name}: expected [{x.shape[-1]}], got shape {tuple(z.shape)}")


def dtype_of(x: Tensor) -> torch.dtype:
    """The dtype of the norm of x."""
    cast = autocast_dtype(x.device) if x.dtype == torch.float32 else None
    return x.dtype if cast is None else cast
