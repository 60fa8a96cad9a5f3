"""Root-mean-square normalisation, alone and with an output gate."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..backend import choose
from ..recompute import remake
from . import composition, reference


def triton(
    x: Tensor, gate: Tensor | None, weight: Tensor | None, eps: float, gate_first: bool, dtype: torch.dtype
) -> Tensor:
    """The Triton implementation, imported when it is first needed: not every platform has Triton."""
    from . import triton_op

    return triton_op.rms_norm(x, gate, weight, eps, gate_first, dtype)[0]


IMPLEMENTATIONS: dict[str, Callable[..., Tensor]] = {
    "triton": triton,
    "torch": composition.forward,
    "reference": reference.forward,
}
LARGEST = 8192  # the kernels hold whole rows in registers


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """x / √(mean x² + eps) · weight over the last axis, computed in at least fp32.

    Args:
        x: Any shape […,D].
        weight: [D], or None for no scale.
        eps: Added inside the root.

    Returns:
        The shape and dtype of x; under autocast that of its products, in which the next layer would cast it anyway.

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """
    return _run("rms_norm", x, None, weight, eps, False)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, gate_first: bool = False
) -> Tensor:
    """rms_norm(x) · SiLU(gate), or rms_norm(x · SiLU(gate)) with `gate_first` (Mamba2).

    Args:
        x: Any shape […,D].
        gate: The shape of x, before the activation.
        weight: [D], or None for no scale.
        eps: Added inside the root.
        gate_first: Whether the gate enters before the norm.

    Returns:
        The shape and dtype of x; under autocast that of its products, in which the next layer would cast it anyway.

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """
    if gate.shape != x.shape:
        raise ValueError(f"gate: expected the shape of x, {tuple(x.shape)}, got {tuple(gate.shape)}")
    return _run("gated_rms_norm", x, gate, weight, eps, gate_first)


def _run(op: str, x: Tensor, gate: Tensor | None, weight: Tensor | None, eps: float, gate_first: bool) -> Tensor:
    size = x.shape[-1]
    if weight is not None and weight.shape != (size,):
        raise ValueError(f"weight: expected [{size}], got shape {tuple(weight.shape)}")
    kind = x.device.type
    mixed = x.dtype == torch.float32 and torch.is_autocast_enabled(kind)
    options = (eps, gate_first, torch.get_autocast_dtype(kind) if mixed else x.dtype)
    if size <= LARGEST:
        run = choose(op, IMPLEMENTATIONS, x)
    else:
        fitting = {name: found for name, found in IMPLEMENTATIONS.items() if name != "triton"}
        run = choose(f"{op} of rows longer than {LARGEST}", fitting, x)
    kept = [None if p is None else p.detach() for p in (x, gate, weight)]
    return remake(run(x, gate, weight, *options), lambda: run(*kept, *options))
