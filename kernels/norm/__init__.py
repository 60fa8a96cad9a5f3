"""Root-mean-square normalisation, alone and with an output gate."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..backend import choose
from ..op import plain
from ..recompute import remake
from . import composition, reference


def triton(
    x: Tensor, gate: Tensor | None, weight: Tensor | None, eps: float, gate_first: bool, dtype: torch.dtype
) -> Tensor:
    """The Triton implementation, imported on first use: not every platform has Triton."""
    from . import triton_op

    return triton_op.rms_norm(x, gate, weight, eps, gate_first, dtype)[0]


IMPLEMENTATIONS: dict[str, Callable[..., Tensor]] = {
    "triton": triton,
    "torch": composition.forward,
    "reference": reference.forward,
}


def separately(x: Tensor, y: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """The sum, then its norm."""
    total = x + y
    return total, rms_norm(total, weight, eps)


def added(x: Tensor, y: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """The sum and its norm in one launch."""
    from .triton_op import Added

    dtype = _dtype(x)
    total, h = Added.apply(x, y, weight, eps, dtype)
    return total, remake(h, triton, total, None, weight, eps, False, dtype)


ADDING = {"triton": added, "torch": separately, "reference": separately}
LARGEST = 8192  # the kernels hold whole rows in registers
LIMITS = f"which takes rows of at most {LARGEST}"


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
    return _run("rms_norm", x, None, weight, eps, False)


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
    if y.shape != x.shape:
        raise ValueError(f"y: expected the shape of x, {tuple(x.shape)}, got {tuple(y.shape)}")
    _check(x, weight)
    fits = x.shape[-1] <= LARGEST and torch.promote_types(x.dtype, y.dtype) == x.dtype
    run = choose("add_rms_norm", ADDING, x) if fits and plain((x, y, weight)) else separately
    return run(x, y, weight, eps)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, gate_first: bool = False
) -> Tensor:
    """rms_norm(x) · SiLU(gate), or rms_norm(x · SiLU(gate)) with `gate_first` (Mamba2).

    Args:
        x: Input of any shape […,D].
        gate: Gate before its activation, in the shape of x.
        weight: Scale [D], or None.
        eps: Added inside the root.
        gate_first: Whether the gate is applied before the norm.

    Returns:
        The norm in the shape and dtype of x; under autocast in the dtype that the next layer would cast it to anyway.

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """
    if gate.shape != x.shape:
        raise ValueError(f"gate: expected the shape of x, {tuple(x.shape)}, got {tuple(gate.shape)}")
    return _run("gated_rms_norm", x, gate, weight, eps, gate_first)


def _run(op: str, x: Tensor, gate: Tensor | None, weight: Tensor | None, eps: float, gate_first: bool) -> Tensor:
    _check(x, weight)
    run = choose(op, IMPLEMENTATIONS, x, None if x.shape[-1] <= LARGEST else LIMITS)
    args = (x, gate, weight, eps, gate_first, _dtype(x))
    return remake(run(*args), run, *args)


def _check(x: Tensor, weight: Tensor | None) -> None:
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(f"weight: expected [{x.shape[-1]}], got shape {tuple(weight.shape)}")


def _dtype(x: Tensor) -> torch.dtype:
    """The dtype of the norm of x."""
    device = x.device.type
    casts = x.dtype == torch.float32 and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if casts else x.dtype
